# A container's log, for kubectl logs: one line, the offset in the file at which
# the rest begins, and the bytes of the log's index that come first; then bytes.
log='/home/hpcuser/.knoc/knoc-c1/u-1/log/main.0'
exec <"$log" || exit 66
from=0
# The index has lines of seconds and bytes: so long was the log when it was last
# written to. What was written before the time asked for is passed over.
since=0
since=$(($(date +%s) - 60))
from=$(awk -v since="$since" '$1 < since && $2 > from { from = $2 } END { print from + 0 }' "$log.at") || exit 66
# The last lines of what is there now; what comes later follows them. They are
# looked for from the end, in ever larger pieces.
size=$(wc -c <"$log") || exit 66
[ "$size" -ge "$from" ] || size=$from
piece=65536
while
	start=$((size - piece))
	[ "$start" -gt "$from" ] &&
		[ "$(tail -c "+$((start + 1))" "$log" | head -c "$((size - start))" | wc -l)" -le 10 ]
do
	piece=$((piece * 8))
done
[ "$start" -gt "$from" ] || start=$from
lines=$(tail -c "+$((start + 1))" "$log" | head -c "$((size - start))" | tail -n 10 | wc -c) || exit 66
from=$((size - lines))
index=$(tail -c "+$((24 + 1))" "$log.at" && echo .) || exit 66
index=${index%.}
echo "$from ${#index}"
printf %s "$index"
[ "$from" -ne 0 ] || exec cat
exec tail -c "+$((from + 1))" "$log"
