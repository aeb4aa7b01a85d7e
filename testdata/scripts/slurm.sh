# One Slurm command for knoc, with a limit on its time; times as Unix seconds.
export SLURM_TIME_FORMAT=%s
unset SQUEUE_FORMAT SQUEUE_FORMAT2 SQUEUE_STATES SQUEUE_SORT SACCT_FORMAT SINFO_FORMAT
out=$(timeout -k 5 60 'squeue' '--noheader' '--format=%i|%T|%r|%P|%N|%S|%e|%j' 'it'\''s "$(id)" \' ) || exit $?
say out "$out"
exit 0
