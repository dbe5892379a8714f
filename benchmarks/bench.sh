#!/bin/bash
# Reproduce benchmarks/results/bench-*.json with `pyssd bench`, from the root of a checkout:
#
#     benchmarks/bench.sh [never-slower] [sampling] [formats] [peers] [synthetic] [classics] [remember]
#
# Without names: all, in this order (hours on two cores). Each file is continued where an earlier run stopped; delete it to
# measure it again. `python benchmarks/tables.py` shows the files as tables and says which cells break a promise.
# DATA: the public prompts (../shared/data). PYTHON: the interpreter pyssd is installed for. PEERS: from `make peers`.
set -eu -o pipefail
cd "$(dirname "$0")/.."

DATA=${DATA:-../shared/data}
PYTHON=${PYTHON:-.venv/bin/python}
PEERS=${PEERS:-build/peers/bin}
RESULTS=${RESULTS:-benchmarks/results}
MODELS=${MODELS:-smollm2-135m gemma-3-270m qwen2.5-coder-0.5b qwen2.5-coder-1.5b}
LARGE=${LARGE:-qwen2.5-coder-1.5b}
SMALL=${SMALL:-smollm2-135m}
DRAFT=${DRAFT:-qwen2.5-coder-0.5b}

PEER_DOMAINS=${PEER_DOMAINS:-chat code code_edit gsm8k summarization text_to_sql storytelling rag}
PEER_LIMIT=${PEER_LIMIT:-5}
SAMPLED=${SAMPLED:-$SMALL $LARGE}
FORMATS=${FORMATS:-F16 Q8_0}
REMEMBER=${REMEMBER:-$LARGE}

# files of these domains
data() { printf "$DATA/%s.dev.jsonl " "$@"; }

ALL=$(data chat code code_edit gsm8k summarization text_to_sql storytelling)

bench() { # NAME MODEL OPTIONS...
    local out="$RESULTS/bench-$1.json"
    shift
    echo "== pyssd bench $* --json $out"
    "$PYTHON" -m pyssd bench "$@" --json "$out"
}

# every model and domain, three pairs: no cell below plain, no prompt slow in all of them
never-slower() {
    for model in $MODELS; do
        bench "$model" "$model" --prompts $ALL --limit 5 --tokens 96 --repeats 3
    done
}

sampling() {
    for model in $SAMPLED; do
        bench "$model-t0.8" "$model" --prompts $ALL --limit 5 --tokens 96 --repeats 3 --temperature 0.8
    done
}

# the large model in other weight types
formats() {
    for type in $FORMATS; do
        local file="build/models/$LARGE-$type.gguf"
        [ -f "$file" ] || "$PYTHON" benchmarks/requantize.py "$LARGE" "$type" "$file"
        bench "$LARGE-$type" "$file" --prompts $ALL --limit 3 --tokens 96 --repeats 3
    done
}

peers() {
    bench "$LARGE-peers" "$LARGE" --prompts $(data $PEER_DOMAINS) --limit "$PEER_LIMIT" --tokens 96 --repeats 2 \
        --peers --peers-bin "$PEERS" --draft-model "$DRAFT"
}

synthetic() {
    for model in $SMALL $LARGE; do
        for acceptance in 0.6 0.8 0.9; do
            bench "$model-synthetic-$acceptance" "$model" --prompts $(data chat code) --limit 5 --tokens 128 \
                --synthetic-acceptance "$acceptance"
        done
    done
}

# what people report as slower with speculation
classics() {
    bench "$LARGE-classics" "$LARGE" --prompts benchmarks/classics.jsonl --tokens 256 --repeats 3
}

# drafts know the prompts before the one that is measured, as one request knows those before it
remember() {
    for model in $REMEMBER; do
        bench "$model-remember" "$model" --prompts $(data chat code gsm8k text_to_sql storytelling) --limit 5 --tokens 96 \
            --repeats 3 --remember
    done
}

for name in "${@:-all}"; do
    case $name in
        never-slower | sampling | formats | peers | synthetic | classics | remember) "$name" ;;
        all) for each in never-slower sampling formats peers synthetic classics remember; do "$each"; done ;;
        *) echo "bench.sh: there is no $name; see its first lines" >&2; exit 2 ;;
    esac
done
