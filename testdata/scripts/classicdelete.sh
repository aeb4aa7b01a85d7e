# End the job of a single container and remove its directory.
cd '/home/hpcuser/.knoc/knoc-c1' 2>/dev/null || exit 0 # there never was one
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
d='default-u-1-main'
[ -d "$d" ] || exit 0
id=
if [ -s "$d/job" ]; then read -r id <"$d/job"; fi
# By name too: sbatch may have been accepted without telling its id.
timeout -k 5 30 scancel --quiet --name='knoc-default-u-1-main' ${id:+"$id"}
# The directory is in use until the job has gone.
t=0
while :; do
	if left=$(timeout -k 5 30 squeue --noheader --name='knoc-default-u-1-main' --format=%i); then
		[ -n "$left" ] || break
	fi
	if [ "$t" -ge 45 ]; then
		echo "its job ${left:-$id} has not ended within 45 s" >&2
		exit 1
	fi
	sleep 1
	t=$((t + 1))
done
rm -rf "$d" "$d".new-*
for other in 'default-u-1'-*; do
	[ -e "$other" ] && exit 0 # shares the pod's emptyDir volumes
done
rm -rf 'default-u-1'
exit 0
