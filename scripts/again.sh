#!/bin/sh
# Runs a command that downloads something up to four times: pip, cargo and apt ask a server again that does not answer, but not one that
# ends in the middle of a file.
#
#   scripts/again.sh COMMAND...
for pause in 5 30 60; do
    "$@" && exit
    echo "again.sh: '$*' failed; once more in $pause s" >&2
    sleep $pause
done
"$@"
