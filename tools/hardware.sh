#!/usr/bin/env bash
# Run the hardware lane on a machine with a GPU: tests, examples and benchmarks against an installed wheel.
#
#   bash tools/hardware.sh [tests|examples|bench|all]...
#
# Takes the newest wheel in .wheel/ that fits this Python; writes junit.xml, info.json, bench_*.json and
# steps.json into $OUT (default ./hardware-out), and with .wheel/stamp.json (tools/validation.py stamp) the
# lane's record, $KINA_LANE.json. Every step runs, whatever the one before it did; the exit status is 1 if any
# failed. RMM's wheels, where .wheel/ has them (rmm, librmm, rapids_logger), go beside kina for bench_memory alone.
# Settings: KINA_LANE (hardware), KINA_SITE (where the wheel goes; RMM's: $KINA_SITE-rmm), KINA_STEP_SECONDS (limit of
# one step), KINA_PYTEST_ARGS.
set -u -o pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root" || exit 2
out=${OUT:-$root/hardware-out}
site=${KINA_SITE:-/tmp/site}
limit=${KINA_STEP_SECONDS:-240}
lane=${KINA_LANE:-hardware}
python=${PYTHON:-python3}
mkdir -p "$out"
out=$(cd "$out" && pwd)

export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export KINA_REQUIRE_GPU=1
export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}

wanted=" ${*:-all} "
for word in $wanted; do
    case $word in
    tests | examples | bench | all) ;;
    *)
        echo "hardware.sh: steps are tests, examples, bench, all; not $word" >&2
        exit 2
        ;;
    esac
done
wants() { [[ $wanted == *" all "* || $wanted == *" $1 "* ]]; }

names=() codes=() seconds=()

# step NAME COMMAND...: runs it under the time limit and notes how it ended.
step() {
    local name=$1 begin code
    shift
    echo "=== $name: $*"
    begin=$(date +%s)
    timeout --kill-after=10 "$limit" "$@"
    code=$?
    [ "$code" -eq 124 ] && echo "=== $name: stopped after $limit s"
    names+=("$name") codes+=("$code") seconds+=($(($(date +%s) - begin)))
}

summary() {
    local i failed=0
    {
        echo '['
        for i in "${!names[@]}"; do
            printf ' {"step": "%s", "exit": %d, "seconds": %d}' "${names[i]}" "${codes[i]}" "${seconds[i]}"
            [ "$i" -lt $((${#names[@]} - 1)) ] && printf ','
            printf '\n'
        done
        echo ']'
    } >"$out/steps.json"
    echo "=== summary"
    for i in "${!names[@]}"; do
        printf '%-16s exit %-4d %5d s\n' "${names[i]}" "${codes[i]}" "${seconds[i]}"
        [ "${codes[i]}" -eq 0 ] || failed=1
    done
    [ "$failed" -eq 0 ] && echo "hardware lane: passed" || echo "hardware lane: FAILED"
    return "$failed"
}

# Modules run from the installed wheel: with -m, Python would put this folder, and its bare kina/, first.
module() { PYTHONSAFEPATH=1 "$python" -m "$@"; }
export -f module
export python

info() { module kina info --json >"$out/info.json" && cat "$out/info.json"; }
export -f info
export out

install() {
    local tag wheel
    tag=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])') || return 1
    wheel=$(ls -t .wheel/kina-*-"$tag"-*.whl 2>/dev/null | head -n 1)
    if [ -z "$wheel" ]; then
        echo "no wheel for $tag in .wheel/: $(ls .wheel 2>/dev/null | tr '\n' ' ')" >&2
        return 1
    fi
    echo "$wheel"
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" \
        "$wheel"
}
install_rmm() {
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site-rmm" \
        .wheel/rmm*.whl .wheel/librmm*.whl .wheel/rapids_logger*.whl
}
export -f install install_rmm
export site

if command -v nvidia-smi >/dev/null; then
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
fi
step install bash -c install
if [ "${codes[0]}" -ne 0 ]; then # nothing below could say anything true
    summary
    exit 1
fi
step info bash -c info

if wants tests; then
    # shellcheck disable=SC2086  # several words are meant
    step tests bash -c 'module pytest "$@"' pytest tests/cuda tests/core tests/interpose \
        tests/test_never.py -q -p no:cacheprovider --junitxml="$out/junit.xml" ${KINA_PYTEST_ARGS:-}
fi
if wants examples; then
    step quickstart "$python" examples/quickstart.py
    for example in raw_ptx raw_cubin raw_nvrtc struct_args warm_chain capture_replay; do
        step "$example" "$python" "examples/$example.py"
    done
    for example in one_pool memory_torch memory_cupy interop_numpy interop_torch interop_cupy; do
        step "$example" "$python" "examples/$example.py"
    done
    if "$python" -c 'import jax' 2>/dev/null; then # not a part of what the lane promises
        step interop_jax "$python" examples/interop_jax.py
    else
        echo "=== interop_jax: this environment has no JAX"
    fi
fi
if wants bench; then
    step bench_launch "$python" benchmarks/bench_launch.py --json "$out/bench_launch.json"
    step bench_session "$python" benchmarks/bench_session.py --json "$out/bench_session.json"
    step bench_modules "$python" benchmarks/bench_modules.py --json "$out/bench_modules.json"
    step bench_graphs "$python" benchmarks/bench_graphs.py --json "$out/bench_graphs.json"
    step bench_exchange "$python" benchmarks/bench_exchange.py --json "$out/bench_exchange.json"
    if compgen -G '.wheel/rmm*.whl' >/dev/null; then
        step install_rmm bash -c install_rmm
    fi
    step bench_memory env PYTHONPATH="$PYTHONPATH:$site-rmm" "$python" benchmarks/bench_memory.py \
        --json "$out/bench_memory.json"
fi
if wants tests && wants bench && [ -f .wheel/stamp.json ]; then
    step record "$python" tools/validation.py record --lane "$lane" --junit "$out/junit.xml" \
        --bench "$out/bench_launch.json" "$out/bench_session.json" "$out/bench_modules.json" \
        "$out/bench_graphs.json" "$out/bench_exchange.json" "$out/bench_memory.json" \
        --stamp .wheel/stamp.json --out "$out/$lane.json"
fi
summary
