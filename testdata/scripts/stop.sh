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
# Commands into jobs: a file each, then one signal that wakes those that run (they
# also look by themselves, when they start and every few seconds). A job that waits
# gets no signal: scancel would try for half a minute to deliver it.
wake='' term='' cancel=''
command() { # UID JOB VERB CONTAINER NUMBER RUNS
	if put "$@"; then
		[ -z "$6" ] || wake="$wake $2"
	elif [ -z "$6" ]; then
		: # it is cancelled below
	elif [ "$3" = stop ] && [ -d "$1/run" ]; then
		term="$term $2" # a full disk: TERM says the same, with the pod's own grace
	elif [ "$3" = stop ]; then
		cancel="$cancel $2" # a directory that is gone: the job cannot end its containers
	fi
}
put() {
	[ -d "$1/cmd" ] || return
	set -- "$@" "$1"/cmd/*
	for last; do :; done
	last=${last##*/}
	case $last in *[!0-9]* | '') last=1000000000 ;; esac
	printf '%s %s %s\n' "$3" "$4" "$5" >"$1/cmd.new" && mv "$1/cmd.new" "$1/cmd/$((last + 1))"
}
command 'u-1' '12' 'stop' '-' 30 '1'

# What came later for pods that are here: a directory beside each, whole when its
# last member, ready, is there. Its files go to their places, then the job is told
# of them; meta, which says what was sent, is the last. All of it may come twice.
tar -xpf - 2>/dev/null
place() { # UID
	[ -e "$1.new-RANDOM/ready" ] && [ -d "$1/cmd" ] || return
	fence
	for f in "$1.new-RANDOM"/env/* "$1.new-RANDOM"/run/*; do
		[ -e "$f" ] || continue
		mv "$f" "$1/${f#"$1.new-RANDOM/"}" || return
	done
}
sent() { # UID JOB RUNS
	mv "$1.new-RANDOM/meta" "$1/meta" || return
	say "changed.$1" ''
	[ -z "$3" ] || wake="$wake $2"
}
place 'u-2' &&
	put 'u-2' '' 'update' 'main' 2 &&
	put 'u-2' '' 'add' 'debugger' 3 &&
	sent 'u-2' '15' '1'
rm -rf 'u-2'.new-RANDOM
place 'it'\''s "$(id)" \' &&
	sent 'it'\''s "$(id)" \' 'it'\''s "$(id)" \' ''
rm -rf 'it'\''s "$(id)" \'.new-RANDOM

# Jobs that wait for an image: back into the queue, held, and out of it again. Slurm
# does so with no job that was submitted with --no-requeue; the pod's own word on
# that holds when the job runs again.
timeout -k 5 30 scontrol update JobId='16' Requeue=1 && timeout -k 5 30 scontrol requeuehold '16'
timeout -k 5 30 scontrol release '17' && timeout -k 5 30 scontrol update JobId='17' Requeue=0
timeout -k 5 30 scontrol release 'it'\''s "$(id)" \'
rc=0
timeout -k 5 30 scancel --quiet '13' || rc=$?
timeout -k 5 30 scancel --quiet --state=PENDING '14' 'it'\''s "$(id)" \' || rc=$?
[ -z "$wake" ] || timeout -k 5 30 scancel --batch --signal=USR1 $wake || rc=$?
[ -z "$term" ] || timeout -k 5 30 scancel --batch --signal=TERM $term || rc=$?
[ -z "$cancel" ] || timeout -k 5 30 scancel --quiet $cancel || rc=$?
exit $rc
