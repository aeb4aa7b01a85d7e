# Only the knoc with the highest epoch may change anything here: an older one
# that still runs, or an exchange of it that was held up, ends with 75. Where
# there is no epoch at all the directory was taken away: 73.
cd '/home/hpcuser/.knoc/knoc-c1' || exit 73
umask 077
fence() {
	set -- epoch/*
	for last; do :; done
	case $last in
	epoch/1000000001) ;;
	'epoch/*') exit 73 ;;
	*) exit 75 ;;
	esac
}
fence
# Slurm has a job whose id sbatch could not tell us: write it down.
[ -s 'u-1'/job ] || { printf '%s\n' '12' >'u-1'/job.new && mv 'u-1'/job.new 'u-1'/job; }
[ -s 'it'\''s "$(id)" \'/job ] || { printf '%s\n' 'it'\''s "$(id)" \' >'it'\''s "$(id)" \'/job.new && mv 'it'\''s "$(id)" \'/job.new 'it'\''s "$(id)" \'/job; }
exit 0
