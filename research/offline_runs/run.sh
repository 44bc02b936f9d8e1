#!/usr/bin/env bash
# Runs tests, benchmarks and experiments on a machine that may have no network, some minutes at a time.
#
#   bash research/offline_runs/run.sh                                in a checkout, with the Python that $PYTHON names
#   bash research/offline_runs/run.sh --archive gpu.tar --minutes 9  what `make gpu-archive` packed, with the torch that is there
#
# The same command goes on where the last one was stopped: first with the steps that have not had their turn.
#
#   --archive FILE   default: the checkout, or the unpacked archive, that this script is in
#   --work DIR       where everything is unpacked, run and written; default: runs/DEVICE
#   --records FILE   read if DIR is new, written after each step; default: DIR/records.tar.gz
#   --minutes N      default: 9
#   --device NAME    cpu or cuda; default: cuda if torch finds it
#   --steps FILE     what to run; default: DEVICE.txt beside this script
#   --again          also the steps that failed before
#   --pack FILE DIR  only pack a folder
#
# An archive of more than MAX_MB (60) is an error.
set -euo pipefail

fail() { echo "error: $*" >&2; exit 1; }

# pack FILE DIR NAME...: names of a folder into a tar file, which stays as it was if this fails, or if it would be too
# large to be carried. Called in conditions, where bash does not end at errors.
pack() {
    local file=$1 folder=$2 new size status=0
    new=$(dirname "$1")/new.$(basename "$1")
    shift 2
    tar -C "$folder" --exclude=__pycache__ --anchored --exclude-from="${left_out:-/dev/null}" -caf "$new" "$@" || status=$?
    # 1: a file changed while it was read.
    if [ "$status" -gt 1 ]; then
        rm -f "$new"
        return "$status"
    fi
    size=$(($(stat -c %s "$new") / 1000000))
    if [ "$size" -lt "${MAX_MB:-60}" ]; then
        mv "$new" "$file"
        return
    fi
    rm "$new"
    echo "error: $file would have $size MB, ${MAX_MB:-60} is the limit. The largest files in it:" >&2
    (cd "$folder" && find "$@" -type f -printf '%s %p\n') | sort -rn | head -n 8 | numfmt --to=si >&2
    return 1
}

# Without weights that have been evaluated, which are most of an experiment, and without experiments that are done, whose
# reports are in records: neither is needed to go on. If runs are too large, those that are not done begin anew.
save() {
    left_out=logs/left_out.txt
    find runs -path '*/evaluation/*/part*/evaluated.json' -printf '%P\n' |
        sed -E 's#^(.*)/evaluation/([^/]+)/part.*#runs/\1/\2/*.safetensors#' > $left_out
    find 'done' -type f -printf 'runs/%P\n' >> $left_out
    local states=('done' failed stopped device logs records) size
    size=$(du --summarize --total --block-size=MB --exclude-from=$left_out runs | tail -n 1 | tr -dc 0-9)
    not_saved=''
    # Text becomes a third and less, weights do not.
    if [ "$size" -lt $((3 * ${MAX_MB:-60})) ] && pack "$records" . "${states[@]}" runs 2> logs/too_large.txt; then
        return
    fi
    pack "$records" . "${states[@]}" || return
    not_saved=" $size MB of runs are not in it."
}

# Prints the steps of a file that have not been stopped, then the others, the longest ago first.
in_turn() {
    grep -vE '^ *(#|$)' "$1" | while IFS='|' read -r name others; do
        name=${name// /}
        echo "$(stat -c %Y "stopped/$name" 2> /dev/null || echo 0)|$name|$others"
    done | sort --stable --field-separator='|' --key=1,1n | cut -d '|' -f 2-
}

# Prints the wheels of a folder whose packages are missing, or there in a version that a chosen wheel refuses.
wheels_to_install() {
    python - "$1" <<'END'
import sys, zipfile
from email import message_from_bytes
from importlib.metadata import distributions
from pathlib import Path
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name, parse_wheel_filename

def requirement(line):
    try:
        return Requirement(line)
    except ValueError:  # of an installed package, from before the standard
        return None

def asked(lines, extras=("",)):
    every = filter(None, map(requirement, lines or []))
    return [one for one in every if not one.marker or any(one.marker.evaluate({"extra": extra}) for extra in extras)]

def is_met(one):
    version = versions.get(canonicalize_name(one.name))
    return version is not None and one.specifier.contains(version, prereleases=True)

wheels = {parse_wheel_filename(path.name)[0]: path for path in Path(sys.argv[1]).glob("*.whl")}
# Of two installed versions, the first is imported.
there = {canonicalize_name(one.metadata["Name"] or ""): one for one in reversed([*distributions()])}
versions = {name: one.version for name, one in there.items()}
needs = {name: asked(one.requires) for name, one in there.items()}
chosen = {name for name in wheels if name not in there or name == "tfidf-tune"}
new, refused = set(chosen), []
while new:
    for name in new:
        with zipfile.ZipFile(wheels[name]) as archive:
            metadata = next(member for member in archive.namelist() if member.endswith(".dist-info/METADATA"))
            lines = message_from_bytes(archive.read(metadata)).get_all("Requires-Dist")
        versions[name] = str(parse_wheel_filename(wheels[name].name)[1])
        needs[name] = asked(lines, ("torchtune", "eval", "report") if name == "tfidf-tune" else ("",))
    # What a chosen wheel refuses is replaced, and what refuses a chosen wheel.
    pairs = [(name, one) for name in needs for one in needs[name] if {name, canonicalize_name(one.name)} & chosen]
    refused = [(name, one) for name, one in pairs if not is_met(one)]
    new = {canonicalize_name(one.name) for _, one in refused} | {name for name, _ in refused}
    new = {name for name in new if name in wheels} - chosen
    chosen |= new
for name in sorted(chosen):
    print(wheels[name])
for name, one in refused:
    print(f"{name} needs {one.name}{one.specifier}; here: {versions.get(canonicalize_name(one.name))}", file=sys.stderr)
END
}

# Into a folder of its own, because the environment may be read-only. One by one if a wheel is for another platform.
install() {
    local wheels pip=(python -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target site)
    mapfile -t wheels < <(wheels_to_install "$1")
    [ ${#wheels[@]} -gt 0 ] || fail "$1 cannot be installed by pip of $python"
    echo "Installing ${#wheels[@]} packages in $work/site."
    rm -rf site
    if ! "${pip[@]}" "${wheels[@]}" 2> /dev/null; then
        rm -rf site
        for wheel in "${wheels[@]}"; do
            "${pip[@]}" "$wheel" 2> logs/pip.txt || echo "not installed: ${wheel##*/}: $(grep -m 1 ERROR logs/pip.txt)"
        done
    fi
    ls -l "$1" > site/ready
}

archive='' work='' records='' minutes=9 device='' steps='' again=''
while [ $# -gt 0 ]; do
    case $1 in
        --pack) pack "$2" "$(dirname "$3")" "$(basename "$3")"; exit ;;
        --again) again=1; shift ;;
        --archive | --work | --records | --minutes | --device | --steps)
            [ $# -gt 1 ] || fail "$1 needs a value"
            printf -v "${1#--}" %s "$2"
            shift 2 ;;
        *) sed -n '2,/^set/ s/^# \{0,1\}//p' "$0"; exit 1 ;;
    esac
done
[[ $minutes =~ ^[0-9]+$ ]] || fail "--minutes is $minutes: give a whole number"
deadline=$((SECONDS + 60 * minutes))
origin=$(cd "$(dirname "$0")/../.." && pwd)
python=$(command -v "${PYTHON:-python3}") || fail "there is no ${PYTHON:-python3}: set PYTHON"
python=$(realpath -s "$python")
[ -n "$device" ] || device=$("$python" -c 'import torch; print("cuda" if torch.cuda.is_available() else "cpu")')
work=${work:-runs/$device}
mkdir -p "$work"
[ ! -e "$work/.git" ] && [ ! -e "$work/tfidf_tune" ] || fail "$work is a checkout, in which this would overwrite folders"
work=$(realpath "$work") records=$(realpath -m "${records:-$work/records.tar.gz}")
mkdir -p "$(dirname "$records")"
[ "$(cat "$work/device" 2> /dev/null || echo "$device")" = "$device" ] || fail "$work is for --device $(cat "$work/device")"
[ "$work" != "$origin" ] || fail "$work is where the steps are read from: set another --work"
[ -z "$steps" ] || steps=$(realpath "$steps")
exec 9> "$work/lock"
"$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)' 2> /dev/null || fail "another run is in $work"
if [ -n "$archive" ]; then
    origin=$work/archive
    rm -rf "$origin"
    mkdir "$origin"
    tar -C "$origin" --strip-components=1 -xf "$archive"
fi

# Not in the checkout, whose folder tfidf_tune would be imported instead of the installed package.
cd "$work"
rm -rf tests research
cp -R "$origin"/{pyproject.toml,tests,research} .
steps=${steps:-$work/research/offline_runs/$device.txt}
[ -f "$steps" ] || fail "there is no $steps"
for earlier in "$records" "$origin/records.tar.gz"; do
    if [ ! -d done ] && [ -f "$earlier" ]; then
        tar -tf "$earlier" > /dev/null || fail "$earlier is not complete"
        if [ "$(tar -xOf "$earlier" device)" = "$device" ]; then
            tar -xf "$earlier"
            echo "Going on from $earlier."
        else
            echo "Not used, because it is of another device: $earlier"
        fi
    fi
done
mkdir -p bin done failed stopped logs records runs
echo "$device" > device
# Steps call `python`. A link would lose the environment that this Python may belong to.
printf '#!/bin/sh\nexec "%s" "$@"\n' "$python" > bin/python
chmod +x bin/python
export PATH=$work/bin:$PATH HF_HUB_OFFLINE=1 TFIDF_TUNE_CACHE=$work/cache
if [ -d "$origin/wheels" ]; then
    [ "$(cat site/ready 2> /dev/null)" = "$(ls -l "$origin/wheels")" ] || install "$origin/wheels"
    export PYTHONPATH=$work/site${PYTHONPATH:+:$PYTHONPATH}
fi

child='' stopped='' saved='' not_saved='' table=''
trap 'stopped=1; [ -z "$child" ] || kill "$child" || true' INT TERM HUP
while IFS='|' read -r name needs command; do
    # shellcheck disable=SC2086 # words
    missing=$(python -c 'import sys, importlib.util as u; print(*(m for m in sys.argv[1:] if not u.find_spec(m.split(".")[0])))' $needs)
    left=$((deadline - SECONDS)) began=$SECONDS status=0
    if [ -f "done/$name" ]; then
        state="done before, $(cat "done/$name")"
    elif [ -f "failed/$name" ] && [ -z "$again" ]; then
        state="failed before, $(cat "failed/$name")"
    elif [ -n "$missing" ]; then
        state="skipped, needs $missing"
    elif [ -n "$stopped" ] || [ "$left" -lt 60 ]; then
        state="to do"
    else
        rm -f "failed/$name"
        echo "$name:$command"
        # In the background, because bash takes no signal while it waits for a command in the foreground.
        timeout --kill-after=15 "$left" bash -c "$command" > "logs/$name.txt" 2>&1 < /dev/null 9>&- &
        child=$!
        [ -z "$stopped" ] || kill "$child" # the signal came just before
        wait "$child" || status=$?
        [ -z "$stopped" ] || wait "$child" || true # which the signal interrupted
        child='' took="$((SECONDS - began)) s"
        if [ "$status" = 0 ]; then
            state="done, $took"
            echo "$took" > "done/$name"
            rm -f "stopped/$name"
        elif [ -n "$stopped" ] || [ "$SECONDS" -ge "$deadline" ]; then
            state="to do, stopped after $took"
            touch "stopped/$name"
        else
            state="failed with status $status, logs/$name.txt"
            echo "$state" > "failed/$name"
            tail -n 5 "logs/$name.txt"
        fi
        saved=''
        if save > /dev/null 2>&1; then saved=1; fi
    fi
    table+=$(printf '%-22s %s' "$name" "$state")$'\n'
done < <(in_turn "$steps")
[ -n "$saved" ] || save || echo "error: no new $records, all is in $work" >&2
printf '\n%s\nLogs and records are in %s, and together in %s.%s\n' "$table" "$work" "$records" "$not_saved"
