"""List every flag of llama.cpp's tools (llama-cli, llama-completion, llama-server), and how
entropykv treats it.

The flags are those of the llama.cpp version in llama-cpp-python 0.3.36 (common/arg.cpp), and some
of earlier versions that are still in use. The parser of the commands, the tests and
the page of the docs about flags (docs/generated_pages.py) all use this table.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from dataclasses import dataclass

from entropykv.errors import SettingsError

CLI, SERVER, COMPLETION, FORMER = "csp-"
"""Letters in a row of the table for the tools that have a flag: llama-cli, llama-server,
llama-completion, and earlier versions of any of them.
"""

_COMMANDS = ("run", "chat", "serve")
"""The commands that accept command lines of llama.cpp."""


class Use(enum.Enum):
    """Define how a command treats a flag."""

    TAKEN = "taken"
    NOTED = "taken with a note"
    REFUSED = "refused"


@dataclass(frozen=True)
class Treatment:
    """Hold how a command treats a flag, and why."""

    use: Use
    why: str = ""
    """Why a noted flag changes nothing, or what to do instead of a refused one."""
    unless: tuple[str, ...] = ()
    """Values with which a refused flag changes nothing, so that it is accepted with a note."""
    places_weights: bool = False
    """If true, the flag is refused only if there is a device that weights could be placed on."""


def noted(why: str) -> Treatment:
    """Return the treatment of a flag that changes nothing."""
    return Treatment(Use.NOTED, why)


def refused(way_out: str, unless: str = "") -> Treatment:
    """Return the treatment of a flag that would change the answer; the arguments are fields of
    Treatment.
    """
    return Treatment(Use.REFUSED, way_out, tuple(unless.split()))


def placed(way_out: str) -> Treatment:
    """Return the treatment of a flag that places weights on a device."""
    return Treatment(Use.REFUSED, way_out, places_weights=True)


TAKEN = Treatment(Use.TAKEN)
_OF_A_SERVER = refused("only a server has it; use `entropykv serve`")


@dataclass(frozen=True)
class LlamaFlag:
    """Hold one flag of llama.cpp with all of its spellings."""

    names: tuple[str, ...]
    tools: str
    """The letters of the tools that have the flag."""
    values: str
    """How many values follow the flag: 0, 1 or 2; `?` means one, unless another flag follows."""
    run: Treatment
    chat: Treatment
    serve: Treatment

    def at(self, command: str) -> Treatment:
        """Return how a command treats the flag; other commands than `run`, `chat` and `serve` treat
        it as `run` does.
        """
        treatment: Treatment = getattr(self, command if command in _COMMANDS else "run")
        return treatment

    def count_values(self, following: Sequence[str]) -> int:
        """Return how many of the following words are values of the flag.

        Raises SettingsError if there are too few.
        """
        if self.values == "?":
            return int(bool(following) and not following[0].startswith("-"))
        count = int(self.values)
        if len(following) < count:
            raise SettingsError(f"{self.names[-1]} needs {count} value{'s'[: count - 1]} behind it")
        return count


def _flags(
    rows: str,
    run: Treatment,
    *,
    chat: Treatment | None = None,
    serve: Treatment | None = None,
) -> list[LlamaFlag]:
    """Return the flags of rows such as `csp 1 -t --threads`; chat and serve default to run's
    treatment.

    A row has the letters of the tools that have the flag, the number of its values, and its
    spellings.
    """
    found = []
    for row in rows.strip().splitlines():
        tools, values, *names = row.split()
        found.append(LlamaFlag(tuple(names), tools, values, run, chat or run, serve or run))
    return found


FLAGS: tuple[LlamaFlag, ...] = (
    *_flags(
        """
        csp 0 -h --help --usage
        csp 0 --version
        """,
        TAKEN,
    ),
    *_flags(
        """
        csp 1 -t --threads
        csp 1 -tb --threads-batch
        csp 1 -c --ctx-size
        csp 1 -b --batch-size
        csp 1 -ub --ubatch-size
        csp ? -fa --flash-attn
        csp 1 -ngl --gpu-layers --n-gpu-layers
        cs 1 --spec-type
        cs 1 --spec-draft-n-max
        cs 1 --draft --draft-n --draft-max
        cs 1 --spec-draft-p-min --draft-p-min
        cs 1 --spec-draft-model -md --model-draft
        csp 1 -m --model
        csp 0 -v --verbose --log-verbose
        csp 1 --lora
        csp 1 --rope-freq-base
        csp 1 --rope-freq-scale
        csp 1 --rope-scaling
        csp 1 --rope-scale
        csp 1 --yarn-orig-ctx
        csp 1 --yarn-ext-factor
        csp 1 --yarn-attn-factor
        csp 1 --yarn-beta-slow
        csp 1 --yarn-beta-fast
        csp 1 --numa
        csp 1 -sm --split-mode
        csp 1 -ts --tensor-split
        csp 1 -mg --main-gpu
        csp 1 --override-kv
        csp 1 -ctk --cache-type-k
        csp 1 -ctv --cache-type-v
        csp 1 --keep
        csp 1 --chat-template
        csp 1 --chat-template-file
        cs 1 --chat-template-kwargs
        csp 1 -lm --load-mode
        - 0 --mmap
        - 0 --no-mmap
        - 0 --mlock
        """,
        TAKEN,
    ),
    *_flags(
        """
        csp 1 -n --predict --n-predict
        csp 1 -s --seed
        csp 1 --temp --temperature
        csp 1 --top-k
        csp 1 --top-p
        csp 1 --min-p
        csp 1 --repeat-penalty
        csp 1 --presence-penalty
        csp 1 --frequency-penalty
        csp 1 --mirostat
        csp 1 --mirostat-lr
        csp 1 --mirostat-ent
        csp 1 -r --reverse-prompt
        """,
        TAKEN,
    ),
    *_flags(
        """
        csp 1 --samplers
        csp 1 --sampler-seq --sampling-seq
        csp 1 --top-nsigma --top-n-sigma
        csp 1 --xtc-probability
        csp 1 --xtc-threshold
        csp 1 --typical --typical-p
        csp 1 --repeat-last-n
        csp 1 --dry-multiplier
        csp 1 --dry-base
        csp 1 --dry-allowed-length
        csp 1 --dry-penalty-last-n
        csp 1 --dry-sequence-breaker
        csp 1 --dynatemp-range
        csp 1 --dynatemp-exp
        """,
        TAKEN,
        serve=refused("llama-cpp-python's requests do not have this sampler; leave it out"),
    ),
    *_flags(
        """
        csp 1 -l --logit-bias
        csp 1 --grammar
        csp 1 --grammar-file
        csp 1 -j --json-schema
        csp 1 -jf --json-schema-file
        csp 0 --ignore-eos
        """,
        TAKEN,
        serve=refused("it is a field of requests; leave it out here"),
    ),
    *_flags(
        """
        csp 1 --adaptive-target
        csp 1 --adaptive-decay
        """,
        refused("the sampler adaptive-p is not available; use --top-p or --min-p"),
    ),
    *_flags(
        """
        cp 1 -p --prompt
        cp 1 -sys --system-prompt
        cp 1 -sysf --system-prompt-file
        cp 1 -f --file
        """,
        TAKEN,
        serve=refused("it is a field of requests; leave it out here"),
    ),
    *_flags(
        """
        csp 0 -e --escape
        """,
        TAKEN,
        serve=noted("texts in requests are JSON strings"),
    ),
    *_flags(
        """
        csp 0 --no-escape
        """,
        noted("backslashes stay as they are unless -e is given"),
    ),
    *_flags(
        """
        p 0 -no-cnv --no-conversation
        """,
        TAKEN,
        serve=refused("requests to /v1/completions are plain text; leave it out"),
    ),
    *_flags(
        """
        p 0 -cnv --conversation
        """,
        refused("`run` gives one answer; use `entropykv chat` for a conversation"),
        serve=noted("/v1/chat/completions serves conversations"),
        chat=noted("this is a conversation"),
    ),
    *_flags(
        """
        cp 0 -st --single-turn
        """,
        noted("`run` has one turn"),
        serve=noted("every request has its own turns"),
        chat=TAKEN,
    ),
    *_flags(
        """
        p 0 -i --interactive
        p 0 -if --interactive-first
        """,
        refused("use `entropykv chat`"),
        chat=noted("this is a conversation"),
    ),
    *_flags(
        """
        cp 0 -mli --multiline-input
        """,
        refused('use `entropykv chat`, and put several lines between two lines of """'),
    ),
    *_flags(
        """
        p 1 --in-prefix
        p 1 --in-suffix
        p 0 --in-prefix-bos
        """,
        refused("use --chat-template"),
    ),
    *_flags(
        """
        p 1 --prompt-cache
        p 0 --prompt-cache-all
        p 0 --prompt-cache-ro
        """,
        TAKEN,
        serve=refused("use --slot-save-path DIR"),
        chat=refused("use --load-session, and /save within the conversation"),
    ),
    *_flags(
        """
        cp 1 -bf --binary-file
        """,
        refused("use -f: it reads text"),
        serve=refused("it is a field of requests; leave it out here"),
    ),
    *_flags(
        """
        cp 0 --verbose-prompt
        cp 0 --display-prompt
        cp 0 --no-display-prompt
        """,
        noted("the prompt is never shown"),
    ),
    *_flags(
        """
        cp ? -co --color
        cp 0 --simple-io
        """,
        noted("answers are plain text"),
    ),
    *_flags(
        """
        csp 0 -sp --special
        """,
        noted("control tokens are never shown"),
    ),
    *_flags(
        """
        csp 0 --perf
        csp 0 --no-perf
        c 0 --show-timings
        c 0 --no-show-timings
        p 1 -ptc --print-token-count
        """,
        noted("figures are always counted"),
    ),
    *_flags(
        """
        csp 1 -C --cpu-mask
        csp 1 -Cr --cpu-range
        csp 1 --cpu-strict
        csp 1 --prio
        csp 1 --poll
        csp 1 -Cb --cpu-mask-batch
        csp 1 -Crb --cpu-range-batch
        csp 1 --cpu-strict-batch
        csp 1 --prio-batch
        csp 1 --poll-batch
        """,
        noted("the system places threads, and -t says how many"),
    ),
    *_flags(
        """
        csp 0 --swa-full
        """,
        noted("the budget also limits layers with windows"),
    ),
    *_flags(
        """
        s 0 -kvu --kv-unified
        s 0 -no-kvu --no-kv-unified
        """,
        noted("all conversations share one pool"),
    ),
    *_flags(
        """
        s 1 --kv-unified-per-slot
        """,
        refused("use -c: every conversation may be as long as the context"),
    ),
    *_flags(
        """
        cs 1 -ctxcp --ctx-checkpoints --swa-checkpoints
        cs 1 -cram --cache-ram
        """,
        noted("a single conversation rolls back without checkpoints"),
        serve=TAKEN,
    ),
    *_flags(
        """
        s 1 -cms --checkpoint-min-step
        """,
        noted("checkpoints are at the ends of prompts and answers"),
    ),
    *_flags(
        """
        s 0 --cache-idle-slots
        s 0 --no-cache-idle-slots
        """,
        noted("idle conversations are swapped out if another one needs room"),
    ),
    *_flags(
        """
        csp 0 --context-shift
        csp 0 --no-context-shift
        """,
        noted("the budget evicts instead, and -c may be longer than the model's context"),
    ),
    *_flags(
        """
        csp 0 --warmup
        csp 0 --no-warmup
        """,
        noted("nothing is read before the prompt"),
    ),
    *_flags(
        """
        csp 0 -kvo --kv-offload
        csp 0 -nkvo --no-kv-offload
        """,
        noted(
            "--store says where K and V are: headwise, in main memory; device, with their layers"
        ),
    ),
    *_flags(
        """
        csp 0 --repack
        csp 0 -nr --no-repack
        csp 0 --no-host
        csp 0 --op-offload
        csp 0 --no-op-offload
        csp 1 -lzm --lazy-mode
        - 0 -dio --direct-io
        - 0 --log-enable
        - 1 --log-format
        - 0 --no-penalize-nl
        """,
        noted("it changes no answer"),
    ),
    *_flags(
        """
        csp 1 -dt --defrag-thold
        """,
        noted("nothing has to be defragmented"),
    ),
    *_flags(
        """
        csp 0 -bs --backend-sampling
        """,
        noted("tokens are sampled on the CPU"),
    ),
    *_flags(
        """
        csp 1 -np --parallel
        """,
        noted("this command writes one text at a time"),
        serve=TAKEN,
    ),
    *_flags(
        """
        - 1 -ns --sequences
        """,
        _OF_A_SERVER,
        serve=refused("use --parallel N to answer N requests at a time"),
    ),
    *_flags(
        """
        s 0 -cb --cont-batching
        s 0 -nocb --no-cont-batching
        """,
        noted("waiting requests are always read together"),
    ),
    *_flags(
        """
        csp 1 -dev --device
        csp 1 -ot --override-tensor
        csp 0 -cmoe --cpu-moe
        csp 1 -ncmoe --n-cpu-moe
        csp 1 -ncffn --n-cpu-ffn
        """,
        placed("llama-cpp-python does not pass it on; use -ngl, -sm, -ts and -mg"),
    ),
    *_flags(
        """
        csp 1 -fit --fit
        csp 1 -fitt --fit-target
        csp 1 -fitc --fit-ctx
        """,
        noted("--kv-budget, -c and -ngl decide what is kept where"),
    ),
    *_flags(
        """
        csp 1 --rpc
        """,
        refused("llama-cpp-python does not reach other machines; leave it out"),
    ),
    *_flags(
        """
        csp 0 --list-devices
        """,
        refused("llama.cpp's own commands list devices"),
    ),
    *_flags(
        """
        csp 0 --check-tensors
        """,
        noted("`entropykv plan` reads the header, and no weights are checked"),
    ),
    *_flags(
        """
        csp 1 --lora-scaled
        """,
        TAKEN,
        serve=refused("use --lora, whose scale is 1"),
    ),
    *_flags(
        """
        csp 1 --control-vector
        csp 1 --control-vector-scaled
        csp 2 --control-vector-layer-range
        """,
        refused("control vectors are not applied; leave it out"),
    ),
    *_flags(
        """
        p 1 -gan --grp-attn-n
        p 1 -gaw --grp-attn-w
        """,
        refused("use -c longer than the model was trained for: positions are re-based"),
    ),
    *_flags(
        """
        csp 1 -mm --mmproj
        """,
        TAKEN,
    ),
    *_flags(
        """
        c 1 --image
        """,
        TAKEN,
        serve=refused("requests bear their images; leave it out"),
    ),
    *_flags(
        """
        csp 1 -mmu --mmproj-url
        """,
        refused("download the projector, and give the file with --mmproj"),
    ),
    *_flags(
        """
        csp 1 -mmdev --mmproj-device
        """,
        refused("the projector is where the model is; leave it out"),
    ),
    *_flags(
        """
        csp 1 --image-min-tokens
        csp 1 --image-max-tokens
        """,
        refused("images have as many tokens as the projector says; leave it out"),
    ),
    *_flags(
        """
        c 1 --audio --video
        csp 1 --video-fps
        csp 1 --video-timestamp-interval
        csp 1 --video-ffmpeg-dir
        """,
        refused("use llama.cpp for sound and video: a KV budget holds text and images"),
    ),
    *_flags(
        """
        s 1 --media-path
        """,
        refused("requests bear their images as data: URLs; leave it out"),
    ),
    *_flags(
        """
        cs 0 --mmproj-auto
        cs 0 --no-mmproj --no-mmproj-auto
        csp 0 --mmproj-offload
        """,
        noted("the projector is the file of --mmproj, and where the model is"),
    ),
    *_flags(
        """
        csp 0 --no-mmproj-offload
        s 1 --mtmd-batch-max-tokens
        """,
        noted("images are encoded one by one, where the model is"),
    ),
    *_flags(
        """
        csp 1 -hf -hfr --hf-repo
        csp 1 -hff --hf-file
        """,
        TAKEN,
    ),
    *_flags(
        """
        csp 1 -hft --hf-token
        """,
        refused("set HF_TOKEN, or log in with `hf auth login`"),
    ),
    *_flags(
        """
        csp 1 -mu --model-url
        csp 1 -dr --docker-repo
        cs 0 --gpt-oss-20b-default
        cs 0 --gpt-oss-120b-default
        cs 0 --vision-gemma-4b-default
        cs 0 --vision-gemma-12b-default
        s 0 --embd-gemma-default
        s 0 --fim-qwen-1.5b-default
        s 0 --fim-qwen-3b-default
        s 0 --fim-qwen-7b-default
        s 0 --fim-qwen-7b-spec
        s 0 --fim-qwen-14b-spec
        s 0 --fim-qwen-30b-default
        """,
        refused("give a GGUF file that is on this machine with -m, or use -hf"),
    ),
    *_flags(
        """
        csp 0 --offline
        """,
        refused("set HF_HUB_OFFLINE=1 in the environment"),
    ),
    *_flags(
        """
        csp 0 -cl --cache-list
        """,
        refused("use `entropykv models`"),
    ),
    *_flags(
        """
        csp 0 --completion-bash
        """,
        refused("completion scripts are not written; use --help"),
    ),
    *_flags(
        """
        c 1 --server-base
        """,
        refused("use a client of OpenAI's API with a running server"),
    ),
    *_flags(
        """
        c 1 -o --output --output-file
        """,
        refused("send standard output to a file: > FILE"),
    ),
    *_flags(
        """
        csp 1 --log-file
        """,
        refused("send standard error to a file: 2> FILE"),
    ),
    *_flags(
        """
        cs 1 --log-prompts-dir
        """,
        refused("conversations are never logged; leave it out"),
    ),
    *_flags(
        """
        csp 0 --log-disable
        csp 0 --log-jsonl
        csp 0 --no-log-jsonl
        csp ? --log-colors
        csp 0 --log-prefix
        csp 0 --no-log-prefix
        csp 0 --log-timestamps
        csp 0 --no-log-timestamps
        csp 1 -lv --verbosity --log-verbosity
        """,
        noted("llama.cpp's log is shown only with -v"),
    ),
    *_flags(
        """
        s 1 -lcs --lookup-cache-static
        s 1 -lcd --lookup-cache-dynamic
        cs 1 --spec-draft-hf -hfd -hfrd --hf-repo-draft
        cs 1 --spec-draft-threads -td --threads-draft
        cs 1 --spec-draft-threads-batch -tbd --threads-batch-draft
        cs 1 --spec-draft-cpu-mask -Cd --cpu-mask-draft
        cs 1 --spec-draft-cpu-range -Crd --cpu-range-draft
        cs 1 --spec-draft-cpu-strict --cpu-strict-draft
        cs 1 --spec-draft-prio --prio-draft
        cs 1 --spec-draft-poll --poll-draft
        cs 1 --spec-draft-cpu-mask-batch -Cbd --cpu-mask-batch-draft
        cs 1 --spec-draft-cpu-strict-batch --cpu-strict-batch-draft
        cs 1 --spec-draft-prio-batch --prio-batch-draft
        cs 1 --spec-draft-poll-batch --poll-batch-draft
        csp 1 --spec-draft-type-k -ctkd --cache-type-k-draft
        csp 1 --spec-draft-type-v -ctvd --cache-type-v-draft
        cs 1 --spec-draft-override-tensor -otd --override-tensor-draft
        cs 0 --spec-draft-cpu-moe -cmoed --cpu-moe-draft
        cs 1 --spec-draft-n-cpu-moe --spec-draft-ncmoe -ncmoed --n-cpu-moe-draft
        cs 1 --spec-draft-n-min
        cs 1 --spec-synth-len
        cs 1 --spec-synth-rates
        cs 1 --spec-draft-p-split --draft-p-split
        cs 0 --spec-draft-backend-sampling
        cs 1 --spec-draft-device -devd --device-draft
        cs 1 --spec-draft-ngl -ngld --gpu-layers-draft --n-gpu-layers-draft
        cs 1 --spec-ngram-mod-n-min
        cs 1 --spec-ngram-mod-n-max
        cs 1 --spec-ngram-mod-n-match
        cs 1 --spec-ngram-simple-size-n
        cs 1 --spec-ngram-simple-size-m
        cs 1 --spec-ngram-simple-min-hits
        cs 1 --spec-ngram-map-k-size-n
        cs 1 --spec-ngram-map-k-size-m
        cs 1 --spec-ngram-map-k-min-hits
        cs 1 --spec-ngram-map-k4v-size-n
        cs 1 --spec-ngram-map-k4v-size-m
        cs 1 --spec-ngram-map-k4v-min-hits
        cs 1 --draft-min --draft-n-min
        s 1 --spec-ngram-size-n
        s 1 --spec-ngram-size-m
        s 1 --spec-ngram-min-hits
        cs 0 --spec-default
        """,
        refused(
            "drafts come from the text itself, or from -md, with the same threads and "
            "--draft-kv-budget: use --spec-type, -md, --draft-max and --draft-p-min"
        ),
    ),
    *_flags(
        """
        cs 0 --no-spec-draft-backend-sampling
        """,
        noted("drafts are always chosen on the CPU"),
    ),
    *_flags(
        """
        csp 1 --reasoning-format
        csp 1 -rea --reasoning
        csp 1 --reasoning-budget
        csp 1 --reasoning-effort
        csp 1 --reasoning-budget-message
        """,
        TAKEN,
    ),
    *_flags(
        """
        csp 0 --reasoning-preserve
        csp 0 --no-reasoning-preserve
        """,
        noted("the chat template says which earlier thoughts are read again"),
    ),
    *_flags(
        """
        csp 0 --jinja
        csp 0 --no-jinja
        """,
        noted("chat templates are always Jinja"),
    ),
    *_flags(
        """
        csp 0 --skip-chat-parsing
        """,
        noted("answers are shown as they are"),
        serve=refused("tool calls are always read; leave it out"),
    ),
    *_flags(
        """
        csp 0 --no-skip-chat-parsing
        """,
        noted("tool calls are always read at `serve`"),
    ),
    *_flags(
        """
        s 0 --prefill-assistant
        """,
        refused("an answer cannot continue a message of the assistant; use /v1/completions"),
    ),
    *_flags(
        """
        s 0 --no-prefill-assistant
        """,
        noted("an answer cannot continue a message of the assistant"),
    ),
    *_flags(
        """
        s 1 --host
        s 1 --port
        s 1 --api-key
        s 1 --api-key-file
        s 1 -a --alias
        s 1 --tags
        s 1 --api-prefix
        s 1 --cors-origins
        s 1 --ssl-key-file
        s 1 --ssl-cert-file
        s 1 -to --timeout
        s 1 --slot-save-path
        s 0 --ui --webui
        s 0 --no-ui --no-webui
        """,
        _OF_A_SERVER,
        serve=TAKEN,
    ),
    *_flags(
        """
        s 0 --reuse-port
        """,
        _OF_A_SERVER,
        serve=noted("the server shares its port with no other process"),
    ),
    *_flags(
        """
        s 1 --cors-methods
        s 1 --cors-headers
        """,
        _OF_A_SERVER,
        serve=noted("pages of --cors-origins may use all methods and headers"),
    ),
    *_flags(
        """
        s 0 --no-cors-credentials
        """,
        _OF_A_SERVER,
        serve=noted("web pages send a key, and no cookies"),
    ),
    *_flags(
        """
        s 1 --ui-config --webui-config
        s 1 --ui-config-file --webui-config-file
        """,
        _OF_A_SERVER,
        serve=noted("the page at / keeps what its user sets"),
    ),
    *_flags(
        """
        s 0 --no-ui-mcp-proxy --no-webui-mcp-proxy
        s 0 -no-ag --no-agent
        """,
        _OF_A_SERVER,
        serve=noted("the server runs no tools"),
    ),
    *_flags(
        """
        s 1 --sse-ping-interval
        """,
        _OF_A_SERVER,
        serve=noted("streams send pings to stay open"),
    ),
    *_flags(
        """
        s 1 --threads-http
        """,
        _OF_A_SERVER,
        serve=noted("one thread accepts all requests"),
    ),
    *_flags(
        """
        s 0 --cache-prompt
        s 0 --no-cache-prompt
        s 1 --cache-reuse
        s 1 -sps --slot-prompt-similarity
        """,
        _OF_A_SERVER,
        serve=noted("requests reuse what was already read of their text"),
    ),
    *_flags(
        """
        s 0 --metrics
        s 0 --props
        s 0 --slots
        """,
        _OF_A_SERVER,
        serve=noted("/metrics, /props and /slots are always there"),
    ),
    *_flags(
        """
        s 0 --cors-credentials
        """,
        _OF_A_SERVER,
        serve=refused("web pages send a key, and no cookies; leave it out"),
    ),
    *_flags(
        """
        s 0 --no-slots
        """,
        _OF_A_SERVER,
        serve=refused("each user sees only their own; use --api-key"),
    ),
    *_flags(
        """
        s 1 --path
        """,
        _OF_A_SERVER,
        serve=refused("the page at / comes with entropykv; use --no-ui for none"),
    ),
    *_flags(
        """
        s 1 --tools
        s 1 --tools-runtime
        s 1 --mcp-servers-config
        s 1 --mcp-servers-json
        s 0 -ag --agent
        s 0 --ui-mcp-proxy --webui-mcp-proxy
        """,
        _OF_A_SERVER,
        serve=refused("clients run tools, and the server runs none; leave it out"),
    ),
    *_flags(
        """
        s 0 --embedding --embeddings
        s 0 --rerank --reranking
        s 1 --pooling
        s 1 --embd-normalize
        """,
        refused("that needs no KV cache; use llama-server"),
    ),
    *_flags(
        """
        s 1 --models-dir
        s 1 --models-preset
        s 1 --models-max
        s 0 --models-autoload
        s 0 --no-models-autoload
        s 1 --sleep-idle-seconds
        """,
        _OF_A_SERVER,
        serve=TAKEN,
    ),
    *_flags(
        """
        s 0 --lora-init-without-apply
        """,
        _OF_A_SERVER,
        serve=refused("adapters are applied when the model is loaded; leave it out"),
    ),
    *_flags(
        """
        s 0 --spm-infill
        """,
        _OF_A_SERVER,
        serve=refused("`suffix` of a request comes before the text that is written; leave it out"),
    ),
)
"""All flags, grouped by their treatment."""


@functools.cache
def _by_name() -> dict[str, LlamaFlag]:
    return {name: flag for flag in FLAGS for name in flag.names}


def flag_named(name: str) -> LlamaFlag | None:
    """Return the flag with this spelling; None if llama.cpp has no such flag."""
    return _by_name().get(name)


def flags_of(tools: str) -> list[LlamaFlag]:
    """Return the flags that any of `tools` has, which are letters as in LlamaFlag.tools."""
    return [flag for flag in FLAGS if set(flag.tools) & set(tools)]


def count_uses(tools: str, command: str) -> dict[Use, int]:
    """Return how many flags of `tools` a command takes, takes with a note, and refuses."""
    uses = [flag.at(command).use for flag in flags_of(tools)]
    return {use: uses.count(use) for use in Use}
