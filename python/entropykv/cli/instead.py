"""Say what to do instead of a flag of llama.cpp's tools that has no equivalent here."""

from __future__ import annotations

_ONE_MODEL = "give a GGUF file that is on this machine with -m, or use -hf"
_ONE_DEVICE = "leave it out: layers go to the device by -ngl"
_NO_CACHE_FILE = "use --save-session and --load-session"
_NO_DRAFT = "leave it out: a draft model is only for EntropyLlama (draft_model)"
_NO_IMAGES = "use llama.cpp for images: a KV budget holds text"
_NOT_NEEDED = "leave it out: it changes nothing here"
_SERVER = "use `entropykv serve`"
_CHAT = "use `entropykv chat`"
_LONGER = "use -c longer than the model was trained for: positions are re-based"
_OF_REQUESTS = "requests say it themselves; leave it out here"
_LOG_IN = "set HF_TOKEN, or log in with `hf auth login`"
_SESSIONS = "use --sessions DIR, with --replicas"
_TURNS = "use --parallel N to answer N requests at a time"

_ROWS: tuple[tuple[str, str | None, str | None], ...] = (
    ("-hft --hf-token", _LOG_IN, None),
    ("--offline", "set HF_HUB_OFFLINE=1 in the environment", None),
    ("-mu --model-url -dr --docker-repo", _ONE_MODEL, None),
    ("-sm --split-mode", _ONE_DEVICE, "use --split_mode"),
    ("-ts --tensor-split", _ONE_DEVICE, "use --tensor_split"),
    ("-dev --device -mg --main-gpu -ot --override-tensor -fit --fit", _ONE_DEVICE, None),
    ("-cmoe --cpu-moe -ncmoe --n-cpu-moe --rpc", _ONE_DEVICE, None),
    ("--prompt-cache --prompt-cache-all --prompt-cache-ro", _NO_CACHE_FILE, _SESSIONS),
    (
        "-md --model-draft -ngld --draft-max --draft",
        _NO_DRAFT,
        "use --draft_model prompt-lookup-decoding, with a full budget",
    ),
    ("-mm --mmproj --image --audio", _NO_IMAGES, None),
    ("-np --parallel -ns --sequences -cb --cont-batching", _SERVER, _TURNS),
    ("--host --port --api-key --api-key-file -a --alias", _SERVER, None),
    ("-co --color --simple-io -sp --special -dt --defrag-thold", _NOT_NEEDED, None),
    ("--no-warmup --warmup --perf --no-perf -C -Cr -rea", _NOT_NEEDED, None),
    ("--prio --poll -nr --no-repack --swa-full --backend-sampling", _NOT_NEEDED, None),
    ("--context-shift --no-context-shift", _NOT_NEEDED, None),
    ("--check-tensors", "leave it out: files are checked by `entropykv plan`", None),
    ("-i --interactive -if", _CHAT, None),
    (
        "-mli --multiline-input",
        f'{_CHAT}, and put several lines between two lines of """',
        None,
    ),
    ("--in-prefix --in-suffix", "use --chat-template", "use --chat_format"),
    ("-bf --binary-file", "use -f: text is read from it", _OF_REQUESTS),
    ("--keep", "use --sinks: first tokens that are never evicted", None),
    ("-gan --grp-attn-n", _LONGER, None),
    ("-lv", "use -v", None),
    ("--log-file", "send standard error to a file: 2> FILE", None),
    ("--log-disable", "send standard error to /dev/null: 2> /dev/null", None),
    ("--override-kv", "change the file's metadata with gguf-py", None),
    ("--control-vector", "leave it out: control vectors are not served", None),
    ("-ctk --cache-type-k -ctv --cache-type-v", None, "K and V have one type; use --kv-type"),
    ("--embeddings --reranking", None, "that needs no KV cache; use llama-server"),
    ("--slot-save-path", None, _SESSIONS),
    (
        "--chat-template --chat-template-file",
        None,
        "use --chat_format, or a model that has one",
    ),
    ("-n --predict --n-predict", None, _OF_REQUESTS),
    ("--temp --top-k --top-p --min-p --repeat-penalty", None, _OF_REQUESTS),
)
"""Flags, what to do at every command, and what to do at `serve` where that is something else."""

INSTEAD = {flag: advice for flags, advice, _ in _ROWS if advice for flag in flags.split()}
"""Flags of llama.cpp's tools that no command has, and what to do instead."""

AT_SERVE = INSTEAD | {
    flag: advice for flags, _, advice in _ROWS if advice for flag in flags.split()
}
"""The same for `entropykv serve`, which takes llama-server's flags."""


def what_instead(flag: str, command: str) -> str | None:
    """Return what to do instead of a flag that this command lacks; None where nobody knows it."""
    return (AT_SERVE if command == "serve" else INSTEAD).get(flag)
