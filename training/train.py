"""Train the facts model: `python -m training.train --out build/bitnet-facts`.

The same command continues from the last checkpoint. The documents get longer when held-out
questions are answered at the current length.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from training.facts import Document, Writer
from training.model import BitNet, Shape, place_induction
from training.tokenizer import WordTokenizer

LENGTHS = [64, 128, 256, 512, 1024, 2048]
TOKENS_PER_STEP = 8192
ENOUGH = 0.9  # The share of right answers at which the next length begins.
REST = 0.15  # The share of tokens outside answers that also count in the loss.
REST_WEIGHT = 0.3


@dataclass
class Progress:
    """Hold the progress of a training, which a checkpoint has besides weights and optimiser."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    stage: int = 0
    log: list[dict[str, float]] = field(default_factory=list)


def main() -> None:
    """Train until the given number of tokens has been read."""
    options = _options()
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer = WordTokenizer()
    model = BitNet(Shape(n_vocab=len(tokenizer)))
    if not options.plain_start:
        place_induction(model)
    trainer = Trainer(model, tokenizer, options)
    trainer.load()
    trainer.run()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--tokens", type=float, default=15e6, help="to see in all")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--start", type=int, default=1, help="first length, as an index")
    parser.add_argument("--plain-start", action="store_true", help="no induction circuit at first")
    parser.add_argument("--eager", action="store_true", help="do not compile: for a few steps")
    return parser.parse_args()


class Trainer:
    """Hold the model, the optimiser and the data of one run."""

    def __init__(
        self, model: BitNet, tokenizer: WordTokenizer, options: argparse.Namespace
    ) -> None:
        """Prepare the training; no step is done yet."""
        self.model = model
        self.tokenizer = tokenizer
        self.options = options
        self.progress = Progress(stage=options.start)
        self.path = options.out / "checkpoint.pt"
        compiled = torch.compile(model.hidden, dynamic=False)
        self.hidden = model.hidden if options.eager else compiled
        embedding = [model.embed_tokens.weight]
        rest = [p for name, p in model.named_parameters() if name != "embed_tokens.weight"]
        self.optimiser = torch.optim.AdamW(
            [{"params": rest, "scale": 1.0}, {"params": embedding, "scale": 2.0}],
            lr=options.rate,
            betas=(0.9, 0.98),
            weight_decay=0.0,
            fused=True,
        )

    def run(self) -> None:
        """Train until the given number of tokens was read, and save a checkpoint every five
        minutes.
        """
        saved = time.monotonic()
        while self.progress.tokens < self.options.tokens:
            started = time.monotonic()
            loss, accuracy = self.step()
            self.progress.seconds += time.monotonic() - started
            if self.progress.step % 50 == 0:
                self.report(loss, accuracy)
            if self.progress.step % 250 == 0:
                self.advance()
            if time.monotonic() - saved > 300:
                self.save()
                saved = time.monotonic()
        self.advance()
        self.save()

    def step(self) -> tuple[float, float]:
        """Train on one batch; return the loss and the accuracy of its answers."""
        progress = self.progress
        # The seed of a step is the same after the training was resumed.
        torch.manual_seed(self.options.seed + progress.step)
        self.optimiser.zero_grad(set_to_none=True)
        for group in self.optimiser.param_groups:
            group["lr"] = self.rate() * group["scale"]
        tokens, is_answer = self.batch()
        hidden = self.hidden(tokens[:, :-1]).flatten(0, 1)
        target, answer = tokens[:, 1:].flatten(), is_answer[:, 1:].flatten()
        chosen = (answer | (torch.rand(answer.shape) < REST)).nonzero().flatten()
        logits = self.model.head(hidden[chosen])
        losses = functional.cross_entropy(logits, target[chosen], reduction="none")
        weight = torch.where(answer[chosen], 1.0, REST_WEIGHT)
        loss = (losses * weight).sum() / weight.sum()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        progress.step += 1
        progress.tokens += tokens.numel()
        asked = answer[chosen]
        right = (logits.argmax(-1) == target[chosen])[asked]
        return float(losses[asked].detach().mean()), float(right.float().mean())

    def rate(self) -> float:
        """Return the learning rate, with a warm-up over 200 steps, and decay to a twentieth over
        the last third.
        """
        left = 1.0 - self.progress.tokens / self.options.tokens
        warm = min(1.0, (self.progress.step + 1) / 200)
        peak: float = self.options.rate
        return peak * warm * max(0.05, min(1.0, 3.0 * left))

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return documents of one length: (n, length + 1) tokens, and which of them are answers.

        Two in three steps use the current stage's length, the others a shorter one.
        """
        step, stage = self.progress.step, self.progress.stage
        writer = Writer(f"train {self.options.seed} {step}")
        if writer.random.random() < 0.34:
            stage = writer.random.randrange(stage + 1)
        length = LENGTHS[stage]
        documents = [
            writer.training_document(length + 1, n_filler=0.2, n_questions=0.45)
            for _ in range(TOKENS_PER_STEP // length)
        ]
        return self._tensors(documents)

    def _tensors(self, documents: list[Document]) -> tuple[Tensor, Tensor]:
        tokens = torch.tensor([self.tokenizer.encode(d.words) for d in documents])
        return tokens, torch.tensor([d.is_answer for d in documents])

    @torch.no_grad()
    def recall(self, n_tokens: int, n_documents: int = 16) -> float:
        """Return the share of held-out questions answered right after documents of `n_tokens`
        tokens.
        """
        writer = Writer(f"held out {n_tokens}")
        right = asked = 0
        for _ in range(n_documents):
            text, facts = writer.test_document(n_tokens, n_questions=8)
            document = Document(text, [False] * len(text))
            for fact in facts:
                writer.ask(document, fact)
            tokens, is_answer = self._tensors([document])
            logits = self.model.head(self.model.hidden(tokens[:, :-1]))[0]
            wrong = (logits.argmax(-1) != tokens[0, 1:]) & is_answer[0, 1:]
            ends = is_answer[0, 1:] & ~torch.cat((is_answer[0, 2:], torch.tensor([False])))
            spans = wrong.cumsum(0)[ends]
            misses = torch.diff(spans, prepend=torch.zeros(1, dtype=spans.dtype))
            right += int((misses == 0).sum())
            asked += len(facts)
        return right / asked

    def advance(self) -> None:
        """Measure recall of held-out questions, and switch to longer documents if it is good
        enough.
        """
        progress = self.progress
        lengths = [LENGTHS[progress.stage], *LENGTHS[progress.stage + 1 :][:2]]
        recalls = {length: self.recall(length) for length in lengths}
        progress.log.append({"tokens": progress.tokens, **{str(k): v for k, v in recalls.items()}})
        print("held out:", {k: round(v, 3) for k, v in recalls.items()}, flush=True)
        if recalls[lengths[0]] >= ENOUGH and progress.stage + 1 < len(LENGTHS):
            progress.stage += 1

    def report(self, loss: float, accuracy: float) -> None:
        """Print one line of progress."""
        p = self.progress
        print(
            f"step {p.step} {p.tokens / 1e6:.2f}M tokens {p.tokens / p.seconds:.0f}/s "
            f"length {LENGTHS[p.stage]} loss {loss:.3f} right {accuracy:.3f}",
            flush=True,
        )

    def save(self) -> None:
        """Write the checkpoint under a temporary name, then rename it."""
        partial = self.path.with_suffix(".part")
        state = {
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "progress": asdict(self.progress),
        }
        torch.save(state, partial)
        partial.replace(self.path)
        (self.options.out / "log.json").write_text(json.dumps(self.progress.log, indent=1))

    def load(self) -> None:
        """Load the checkpoint, if there is one."""
        if self.path.exists():
            state = torch.load(self.path, weights_only=True)
            self.model.load_state_dict(state["model"])
            self.optimiser.load_state_dict(state["optimiser"])
            self.progress = Progress(**state["progress"])


if __name__ == "__main__":
    main()
