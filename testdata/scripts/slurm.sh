# One Slurm command for knoc, with a limit on its time; times as Unix seconds.
export SLURM_TIME_FORMAT=%s
unset SQUEUE_FORMAT SQUEUE_FORMAT2 SQUEUE_STATES SQUEUE_SORT SACCT_FORMAT SINFO_FORMAT
out=$(timeout -k 5 60 'squeue' '--noheader' '--format=%i|%T|%r|%P|%N|%S|%e|%j' 'it'\''s "$(id)" \' ) || exit $?
say out "$out"
# And the images that are here: their first two lines.
for f in '/home/u/images'/ref.*; do
	{ read -r name && read -r facts; } <"$f" || continue
	say image "${name#\# } $facts"
done 2>/dev/null
exit 0
