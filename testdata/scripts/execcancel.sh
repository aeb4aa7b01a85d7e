# The client of a kubectl exec is gone: end its step, which has a name of its own.
timeout -k 5 20 squeue --steps --noheader --jobs='12' --format='%i %j' 2>/dev/null |
while read -r step name; do
	[ "$name" != 'knoc-exec-1' ] || timeout -k 5 20 scancel --quiet "$step"
done
exit 0
