# A container's log, for kubectl logs: one line, the offset in the file at which
# the rest begins, then bytes.
exec <'/home/hpcuser/.knoc/knoc-c1/u-1/log/main.0' || exit 66
# The last lines of what is there now; what comes later follows them.
size=$(wc -c <'/home/hpcuser/.knoc/knoc-c1/u-1/log/main.0') || exit 66
lines=$(head -c "$size" | tail -n '10' | wc -c) || exit 66
echo $((size - lines))
exec tail -c "+$((size - lines + 1))" '/home/hpcuser/.knoc/knoc-c1/u-1/log/main.0'
