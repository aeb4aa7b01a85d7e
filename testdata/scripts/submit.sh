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
# The stream may be cut at any byte, and tar then ends with 0 and half a pod:
# its status says nothing. A pod is whole when its last member, ready, is there.
down=submit.down-$$
errors=$(tar -xpf - 2>&1 | tail -c 1000) # no file: there may be no room for one

# submit UID ACTION: make the staged directory the pod's own and hand it to
# Slurm, once. The directory lock says that sbatch was called, or never may be:
# - submit: calls sbatch if nobody has;
# - retry: knoc has asked Slurm and it does not have the job: calls sbatch again,
#   when the last call is surely over (it is bounded by timeout);
# - seal: the pod is to go: takes the lock, so that nobody calls sbatch any more,
#   not even an exchange that lost its connection and is still at work here;
# - drop: seal, as retry would: sbatch was called, and Slurm does not have the job.
submit() {
	d=$1 new=$1.new-RANDOM
	if [ -e "$d/ready" ]; then
		rm -rf "$d".new-* # an earlier exchange got as far as this
	elif [ "$2" = seal ] || [ "$2" = drop ]; then
		mkdir -p "$d" || return
	else
		[ -e "$new/ready" ] || return
		fence
		mv -T "$new" "$d" || return
	fi
	[ -s "$d/job" ] && return
	if [ -e "$down" ] && [ "$2" != seal ] && [ "$2" != drop ]; then
		return # it stays staged until slurmctld is back
	fi
	if ! mkdir "$d/lock" 2>/dev/null; then
		[ "$2" = retry ] || [ "$2" = drop ] || return
		[ ! -e "$d/sealed" ] || return
		since=0
		read -r since <"$d/lock/since" 2>/dev/null
		[ -e "$d/lock/over" ] || [ $(($(date +%s) - ${since:-0})) -gt 120 ] || return
		mv -T "$d/lock" "$d/lock.$$" && mkdir "$d/lock" || return
	fi
	if [ "$2" = seal ] || [ "$2" = drop ]; then
		: >"$d/sealed"
		return
	fi
	date +%s >"$d/lock/since" || return # without it nobody could tell when the call is over
	again=--no-requeue
	[ ! -e "$d/requeue" ] || again=--requeue
	fence
	id=$(timeout -k 5 60 sbatch --parsable "$again" --export=NONE --chdir="$PWD/$d" --output="$PWD/$d/slurm.out" "--job-name=knoc-$d" "$d/pod.sh" 2>"$d/submit.error")
	rc=$?
	if [ "$rc" = 0 ] && [ -n "$id" ]; then
		printf '%s\n' "$id" >"$d/job.new" && mv "$d/job.new" "$d/job"
	else
		printf '\nsbatch ended with %s\n' "$rc" >>"$d/submit.error"
		: >"$down" # do not let every other pod wait for a controller that is away
	fi
	: >"$d/lock/over"
}
n=0
set -- 'u-1' 'submit' 'it'\''s "$(id)" \' 'seal'
while [ $# -gt 1 ]; do
	submit "$1" "$2" &
	n=$((n + 1))
	[ $((n % 4)) = 0 ] && wait
	shift 2
done
wait
rm -f "$down"
for uid in 'u-1' 'it'\''s "$(id)" \'; do
	rm -rf "$uid.new-RANDOM" # what is by half, or came too late, holds secrets all the same
	if [ -s "$uid/job" ] && read -r id <"$uid/job"; then
		say "job.$uid" "$id"
	elif [ -e "$uid/sealed" ]; then
		say "sealed.$uid" ''
	elif [ -e "$uid/lock" ]; then
		text=$(tail -c 4000 "$uid/submit.error" 2>/dev/null)
		say "error.$uid" "${text:-sbatch has not answered yet}"
	elif [ -e "$uid/ready" ]; then
		say "staged.$uid" ''
	else
		say "unstaged.$uid" "$errors"
	fi
done
exit 0
