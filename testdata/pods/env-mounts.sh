#!/bin/sh
# Kubernetes pod default/env-mounts
# uid 6c2f1a52-0000-4000-8000-000000000004
#
# Written by knoc, which runs Kubernetes pods as Slurm jobs. This script is the
# whole job: it runs the pod's containers with apptainer as the user who owns the
# job, restarts them as the pod asks, and appends what happens to a journal that
# knoc reads. It listens on nothing and needs nothing but this directory:
#
#   /home/user/.knoc/knoc-c1/6c2f1a52-0000-4000-8000-000000000004
#
# To stop it: scancel JOBID. The containers get TERM, and KILL 30 s later.
#
#SBATCH --ignore-pbs
#SBATCH --job-name=knoc-6c2f1a52-0000-4000-8000-000000000004
#SBATCH --comment=default/env-mounts
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --partition=batch
#SBATCH --cpus-per-task=1
#SBATCH --signal=B:ALRM@45

# Mechanism only: order, run, restart, signal, write down. What the facts mean is
# decided by knoc. POSIX sh with the builtins of dash, bash and busybox; what
# would start a process (cat, seq, ps, mkdir) is avoided, since every pod pays.

# shellcheck disable=SC2016,SC2317 # text in quotes is the pod's; container_1 … are called by number

dir='/home/user/.knoc/knoc-c1/6c2f1a52-0000-4000-8000-000000000004'
uid='6c2f1a52-0000-4000-8000-000000000004'
grace=30     # seconds from TERM to KILL
backoff=10   # seconds before the first restart; doubles up to 300

PATH=${PATH:-/usr/local/bin:/usr/bin:/bin}
umask 077
cd "$dir" || exit 1
limit=''
trap 'woken=1 limit=1' ALRM # Slurm's, some time before a time limit

# A pod runs once, even when Slurm accepted it twice: the job that makes this
# link is the one that runs. When ln fails the link itself is asked, because over
# NFS a request that was sent again fails although the first one was served. A
# job that is requeued finds its own id and goes on.
if [ -z "$SLURM_JOB_ID" ]; then
	echo "knoc: SLURM_JOB_ID is not set: this script runs in a Slurm job only" >&2
	exit 1
fi
ln -s "$SLURM_JOB_ID" claim 2>/dev/null ||
	[ "$(readlink claim)" = "$SLURM_JOB_ID" ] || exit 0

# ---- The journal ----
# One line a fact: seconds, a word, container names, numbers, addresses. After
# each append, when the file is closed again, a marker with a name that was never
# used before appears in ../changed: on a shared file system the names in a
# directory are seen long before a file's new size is. Each writer (this shell
# and one a container) counts for itself and removes its last marker, if knoc
# has not.

restart=${SLURM_RESTART_COUNT:-0}
journal=journal.$restart
writer=0 count=0 marker=''

# note WORD ARGUMENT…: date writes the line itself: one process, and no command
# substitution, in which bash loses traps. The second try is for scancel, which
# sends TERM to every process of the job.
note() {
	date "+%s $*" >>"$journal" || date "+%s $*" >>"$journal"
	count=$((count + 1))
	last=$marker
	marker=../changed/$uid.$restart-$writer.$count
	true >"$marker"
	if [ -n "$last" ] && [ -e "$last" ]; then rm -f "$last"; fi
}

# ---- Stopping and commands ----
# knoc leaves cmd/<number>, one line "<verb> <container or -> <number>", and wakes
# this shell with USR1; the ticker does so every 5 s, in case that got lost. TERM
# is scancel's, or Slurm's own at a preemption; ALRM comes before a time limit. The
# traps only leave a flag that await looks at: a trap within a trap spoils exit
# statuses in dash. A signal just before the wait counts at the next tick.

woken='' term='' stopping='' failed=''
handled=-1 killat='' closing='' told=' ' shot=' ' ending='' settling='' hasty='' dead='' limitat='' soon=''
crew='' sidecars='' apps='' guests='' # supervisors as NAME:PID

attend() {
	while [ -n "$woken" ]; do
		woken=''
		if [ -n "$term" ]; then
			term=''
			stop "$grace" stop
		fi
		if [ -n "$limit" ]; then
			limit=''
			lastcall
		fi
		commands
		[ -z "$dead$limitat" ] || overdue
		[ -z "$stopping$ending" ] || press
		pace
	done
}

commands() {
	for file in cmd/[0-9]*; do
		seq=${file#cmd/}
		case $seq in *[!0-9]*) continue ;; esac
		[ "$seq" -gt "$handled" ] || continue
		verb=''
		{ read -r verb target number <"$file"; } 2>/dev/null
		[ -n "$verb" ] || break # listed but not readable yet: the next tick
		handled=$seq
		case "$verb $target $number" in
		*' - '*[!0-9]* | *' - 0'?* | *' - ') ;; # not a number of seconds
		'stop - '*)
			stop "$number" stop
			note ack "$seq"
			;;
		'refresh - '*)
			[ ! -r "run/refresh.$number/do" ] || sh "run/refresh.$number/do" "$scratch"
			note ack "$seq"
			;;
		'deadline - '*)
			due "$number"
			note ack "$seq"
			;;
		*' '*' '*[!0-9]* | *' '*' ') ;; # not a number
		'update '*)
			update "$target" "$number"
			note ack "$seq"
			;;
		'add '*)
			add "$target" "$number"
			note ack "$seq"
			;;
		esac
	done
}

# numbered NAME: sets number to a container's; false for a name that there is not.
numbered() {
	number=$highest
	for name in $names; do
		[ "$name" != "$1" ] || return 0
		number=$((number - 1))
	done
	return 1
}

# update NAME NUMBER: a container gets another image, which run/update.NAME.NUMBER
# has. Whoever takes it reads run/NAME.image first. One that runs is ended, and its
# supervisor starts it again; one that waits for its next attempt, or for its
# image, need not wait longer. An init container has its work to do first.
update() {
	[ -r "run/update.$1.$2" ] && numbered "$1" || return 0
	image=0
	[ ! -s "run/$1.image" ] || read -r image <"run/$1.image"
	[ "$2" -gt "$image" ] || return 0
	echo "$2" >"run/$1.image"
	look "$1"
	for member in $crew $sidecars $apps; do
		case $member in "$1:"*) ;; *) continue ;; esac
		if [ -z "$pid" ]; then
			kill -USR2 "${member#*:}" 2>/dev/null
		elif [ "$member" != "$crew" ] && [ "$image" != "$2" ]; then
			clock
			end "$number" "$1" $((clock + grace * 100)) update "$grace"
		fi
	done
}

# add NAME NUMBER: an ephemeral container, which run/add.NAME.NUMBER has, starts
# beside the others. The pod's end waits for none of them.
add() {
	[ "$2" -eq $((highest + 1)) ] && [ -r "run/add.$1.$2" ] && [ -z "$stopping" ] || return 0
	# shellcheck source=/dev/null
	. "./run/add.$1.$2"
	highest=$2 names="$1 $names"
	true >"run/$1"
	true >"run/$1.end"
	supervise "$2" "$1" Never &
	guests="$guests $1:$!"
}

# clock sets clock to hundredths of a second since boot: it costs no process and
# nobody sets it back.
clock() {
	read -r clock rest </proc/uptime
	clock=${clock%.*}${clock#*.}
}

# stop SECONDS WHY: ends all containers, and nothing starts any more. Later stops
# can only bring the end forward.
stop() {
	clock
	at=$((clock + $1 * 100))
	if [ -z "$stopping" ] || [ "$at" -lt "$killat" ]; then
		stopping=${stopping:-$2} period=$1 killat=$at
		echo "$1" >run/pod.stop
		[ -n "$closing" ] || note stopping "$1"
	fi
}

# due SECONDS: the pod's time ends so long after the allocation's start. Newer
# Slurms tell when that was; else it is when this script began.
due() {
	if [ -n "$SLURM_JOB_START_TIME" ]; then
		date +%s >run/now
		read -r now <run/now
		clock
		at=$((clock - (now - SLURM_JOB_START_TIME) * 100))
		# Not by another machine's wrong clock.
		if [ "$at" -lt "$begun" ] && [ "$at" -gt $((begun - 60000)) ]; then begun=$at; fi
	fi
	at=$((begun + $1 * 100))
	if [ -z "$dead" ] || [ "$at" -lt "$dead" ]; then dead=$at; fi
}

# overdue looks whether the pod's time is over, or nearly so.
overdue() {
	clock
	soon=''
	for at in $dead $limitat; do
		[ "$at" -gt $((clock + 600)) ] || soon=1
	done
	if [ -n "$dead" ] && [ "$clock" -ge "$dead" ]; then
		dead=''
		[ -n "$stopping" ] || note deadline
		stop "$grace" deadline
	fi
	if [ -n "$limitat" ] && [ "$clock" -ge "$limitat" ]; then
		limitat=''
		[ -n "$stopping" ] || note timelimit
		stop "$grace" stop
	fi
}

# lastcall: Slurm says that the time limit is near, by the grace period and 15 s,
# and up to a minute early. When the job ends is in newer Slurms' environment, or
# asked of squeue where this machine has it. Then that minute is used, and at most
# half of a job's time goes to its end. Without that knowledge a job is not taken
# to be at its end in its first minute. Far from the end Slurm says so for another
# reason: the job is preempted.
lastcall() {
	ends=$SLURM_JOB_END_TIME
	if [ -z "$ends" ] && command -v squeue >/dev/null; then
		SLURM_TIME_FORMAT=standard timeout 10 squeue --noheader --jobs="$SLURM_JOB_ID" --format=%e >run/ends
		IFS=T read -r day hour <run/ends
		case $day in # a limit there may not be
		*-*-*) date -d "$day $hour" +%s >run/ends && read -r ends <run/ends ;;
		esac
	fi 2>/dev/null
	clock
	limitat=$clock
	if [ -z "$ends" ]; then
		[ $((clock - begun)) -gt 6000 ] || limitat=''
		return 0
	fi
	date +%s >run/now
	read -r now <run/now
	left=$((ends - now)) spare=$((grace + 15))
	if [ "$left" -gt $((spare + 120)) ]; then
		limitat=''
		stop "$grace" stop
		return 0
	fi
	half=$((((clock - begun) / 100 + left) / 2))
	[ "$spare" -le "$half" ] || spare=$half
	limitat=$((clock + (left - spare) * 100))
}

# pace has this shell woken every second while time matters. The ticker is not
# told to: bash loses signals, and sometimes itself, when two come at once.
pace() {
	if [ -n "$stopping$ending$settling$soon" ]; then
		[ -z "$hasty" ] || return 0
		hasten </dev/null >/dev/null 2>&1 &
		hasty=$!
	else
		calm
	fi
}

hasten() {
	trap '' TERM
	while sleep 1; do kill -USR1 $$ || break; done
}

calm() {
	[ -n "$hasty" ] || return 0
	below "$hasty"
	# shellcheck disable=SC2086
	kill -KILL "$hasty" $kin
	wait "$hasty"
	hasty=''
} 2>/dev/null

# look NAME: sets pid, attempt and image of what runs in a container, or pid to
# nothing.
look() {
	pid='' attempt='' image=''
	{
		read -r pid
		read -r attempt
		read -r image
	} <"run/$1"
}

# end NUMBER NAME AT WHY SECONDS: begins to end what runs in a container (see look), with
# KILL at that time of the clock. An end that has begun can only be brought
# forward; end_<number> holds the process and the time.
end() {
	eval "at=\${end_$1:-}"
	case $at in
	"$pid "*) [ "$3" -lt "${at#* }" ] || return 0 ;;
	*)
		note kill "$2" "$attempt" "$4" "$5"
		;;
	esac
	eval "end_$1='$pid $3'"
	ending=1
}

# press brings each end that has begun a step further, at every tick until all is
# over; in a stop also those of containers that may be starting at this very
# moment. The last container comes first, since a sidecar waits for those after it.
press() {
	clock
	ending='' number=$highest
	if [ -n "$stopping" ]; then # out of back-offs and pulls
		for member in $crew $sidecars $apps $guests; do kill -TERM "${member#*:}"; done
	fi
	for name in $names; do
		look "$name"
		if [ -n "$pid" ]; then
			[ -z "$stopping" ] || end "$number" "$name" "$killat" "$stopping" "$period"
			eval "at=\${end_$number:-}"
			case $at in "$pid "*) finish "$number" "$name" "${at#* }" ;; esac
		fi
		number=$((number - 1))
	done
} 2>/dev/null

# finish NUMBER NAME AT: one end's next step.
#
# TERM goes to the runtime's process, which hands it to the container's first
# program and ends with that program's exit code. KILL must not: it would leave
# squashfuse behind. So it goes to the processes below the runtime, among them
# the container's init, with which the kernel ends all others; the runtime then
# cleans up and ends with 137. A runtime that is still there a tick later, or has
# nothing below it, gets KILL itself.
finish() {
	ending=1 at=$3
	case $told in
	*" $pid "*) ;;
	*)
		kill -TERM "$pid" && told="$told$pid "
		eval "term_$1=$clock"
		;;
	esac
	[ "$clock" -ge "$at" ] || return 0
	# Whatever was left of the grace period: 2 s are for TERM, as with a kubelet.
	eval "[ \$((clock - term_$1)) -ge 200 ]" || return 0
	below "$pid"
	case $shot in *" $pid "*) kin="$kin $pid" ;; esac
	# shellcheck disable=SC2086
	kill -KILL ${kin:-"$pid"}
	shot="$shot$pid "
}

# below PID: sets kin to the processes below PID.
below() {
	kin=''
	todo=$1
	while [ -n "$todo" ]; do
		next=''
		for parent in $todo; do
			for file in /proc/"$parent"/task/*/children; do
				more=''
				if [ -r "$file" ]; then
					read -r more <"$file"
				elif [ -d "/proc/$parent" ]; then # a kernel without CONFIG_PROC_CHILDREN
					more=$(pgrep -P "$parent" | tr '\n' ' ')
				fi
				next="$next${more:+ $more}"
			done
		done
		kin=$kin$next
		todo=$next
	done
}

# await NAME:PID: waits for a supervisor and sets rc to its result, 0 or 1. That
# comes from a file, since what wait says of a child after a signal differs from
# shell to shell. One that is gone without a result was killed.
await() {
	while :; do
		attend
		alive=''
		kill -0 "${1#*:}" 2>/dev/null && alive=1
		read -r rc <"run/${1%:*}.end" && return
		rc=1
		[ -n "$alive" ] || return
		wait "${1#*:}"
	done
}

# ---- Every second ----

# A sleep is ended by KILL: other signals get lost in a process that was just
# started and still has this shell's traps.
ticker() {
	trap '' TERM
	trap 'quit=1 cut=1; kill -KILL "$nap"' ALRM # HUP may be ignored for good (nohup)
	nap='' cut='' quit='' beat=0 boot=''
	while [ -z "$quit" ]; do
		sleep 1 &
		nap=$!
		[ -z "$cut" ] || kill -KILL "$nap" # the trap knew the last one
		cut=''
		wait "$nap"
		grown
		beat=$((beat + 1))
		if [ $((beat % 15)) -eq 3 ]; then weigh; fi
		[ $((beat % 5)) -eq 0 ] || continue
		kill -USR1 $$ || break # $$ is the main shell here too
	done
}

# grown: writes down how long logs were when: seconds and bytes, for
# kubectl logs --since and --timestamps. A log that has grown is brought to the
# server, too; a machine may keep what it has written to a file that is open for
# half a minute. Builtins alone ask whether it has.
grown() {
	for file in run/*; do
		name=${file#run/}
		case $name in *.*) continue ;; esac
		look "$name"
		case $attempt in '' | *[!0-9]*) continue ;; esac
		log=log/$name.$attempt
		# shellcheck disable=SC3013 # -nt: dash, bash and busybox have it
		if [ ! -s "$log" ] || [ "run/$name.seen" -nt "$log" ]; then continue; fi
		echo >"run/$name.seen" # before the look: what comes meanwhile counts the next time
		dd if=/dev/null of="$log" conv=notrunc,fsync
		stat -c '%Y %s' "$log" >>"$log.at"
	done
} 2>/dev/null

# weigh writes down what containers use, one line, which is overwritten: the time
# in hundredths of a second, then for each container its name, the attempt,
# hundredths of a second of CPU time and KiB of memory of its own. It reads what
# the kernel says of a container's processes, by builtins alone.
weigh() {
	while [ -z "$boot" ] && read -r key number rest; do
		case $key in btime) boot=$number ;; esac
	done </proc/stat
	clock
	line=$((boot * 100 + clock))
	for file in run/*; do
		name=${file#run/}
		case $name in *.*) continue ;; esac
		look "$name"
		case $pid,$attempt in ,* | *, | *[!0-9,]*) continue ;; esac
		below "$pid"
		ticks=0 kib=0
		for one in $pid $kin; do
			{ read -r rest <"/proc/$one/stat"; } || continue
			# shellcheck disable=SC2086 # fields, after the program's name
			set -- ${rest##*) }
			case ${12}${13}${14}${15} in '' | *[!0-9]*) continue ;; esac
			ticks=$((ticks + ${12} + ${13} + ${14} + ${15})) # its own, and that of children that have ended
			while read -r key number rest; do
				case $key in
				RssAnon: | RssShmem:) kib=$((kib + number)) ;;
				VmData:) break ;;
				esac
			done <"/proc/$one/status"
		done
		line="$line $name $attempt $ticks $kib"
	done
	echo "$line" >run/pod.usage
} 2>/dev/null

# ---- Containers ----

# supervise NUMBER NAME POLICY: one container from its first start to its last
# end; runs in a shell of its own. It waits for the container in the foreground:
# the exit status is then the container's own beyond doubt, and TERM waits too.
supervise() {
	writer=$1 count=0 marker='' nap='' pull='' ended='' cut='' using=0
	have='' sif='' action=run entrypoint='' cmd='' workdir='' kind='' hex=''
	trap : USR1
	trap 'ended=1; halt' TERM
	trap 'cut=1; halt' USR2
	attempt=0 delay=$backoff rc=1
	if [ "$restart" != 0 ]; then # attempts count on when Slurm runs the job again
		while [ -e "log/$2.$attempt" ]; do attempt=$((attempt + 1)); done
	fi
	while [ ! -s run/pod.stop ]; do
		true >>"log/$2.$attempt"
		rc=0
		bring "$1" "$2"
		[ -z "$ended" ] || break
		clock
		began=$clock
		[ "$rc" -ne 0 ] || launch "$@"
		note exit "$2" "$attempt" "$rc"
		if [ -n "$ended" ] || [ -s run/pod.stop ]; then break; fi
		if renewed "$2"; then # it was ended for that: at once, whatever the policy
			attempt=$((attempt + 1)) delay=$backoff
			continue
		fi
		case $3,$rc in Never,* | OnFailure,0) break ;; esac
		clock
		[ $((clock - began)) -lt 60000 ] || delay=$backoff # it ran 10 minutes
		note backoff "$2" "$attempt" "$delay"
		rest "$delay"
		attempt=$((attempt + 1)) delay=$((delay * 2))
		[ "$delay" -le 300 ] || delay=300
		! renewed "$2" || delay=$backoff
	done
	[ "$rc" -eq 0 ] || rc=1
	echo "$rc" >"run/$2.end"
	exit 0
}

# renewed NAME: takes the newest image that knoc has sent for the container; false
# when it has that already.
renewed() {
	cut=''
	[ -s "run/$1.image" ] || return 1
	read -r image <"run/$1.image"
	[ "$image" != "$using" ] || return 1
	using=$image
	# shellcheck source=/dev/null
	. "./run/update.$1.$using"
	note image "$1" "$using"
}

# halt ends what a supervisor waits for beside its container.
halt() {
	[ -z "$nap" ] || kill -KILL "$nap"
	[ -z "$pull" ] || kill "$pull"
} 2>/dev/null

# rest SECONDS
rest() {
	sleep "$1" &
	nap=$!
	[ -z "$ended$cut" ] || halt
	wait "$nap"
	nap=''
}

# launch NUMBER NAME POLICY: one attempt; sets rc to the container's exit code.
launch() {
	true >"msg/$2"
	ooms
	killed=$kills
	true >>"log/$2.$attempt.at"
	note start "$2" "$attempt${hex:+%n%s digest $2 $kind $hex}"
	(contain "$1" "$2" "$attempt") </dev/null >>"log/$2.$attempt" 2>&1
	rc=$?
	true >"run/$2"
	[ ! -s "log/$2.$attempt" ] || stat -c '%Y %s' "log/$2.$attempt" >>"log/$2.$attempt.at" # see grown
	if [ -s "msg/$2" ]; then
		head -c 4096 "msg/$2" >"msg/$2.$attempt"
		note message "$2" "$attempt"
	fi
	ooms # whatever the code is: a program need not care about a child that was killed
	[ "$kills" -le "$killed" ] || note oom "$2" "$attempt"
}

# ooms: sets kills to how many processes of this job's cgroup the kernel has killed
# for memory.
ooms() {
	kills=0
	[ -n "$memory" ] || return 0
	while read -r key number; do
		case $key in oom_kill) kills=$number ;; esac
	done <"$memory"
}

# contain NUMBER NAME ATTEMPT: becomes the container; in a subshell, its output is
# the log. run/NAME holds the process id (and below it the attempt and the number
# of the image) while the container runs and none otherwise; one write is enough,
# for the readers are on this machine. Either stop sees that number and sends TERM,
# or run/pod.stop is seen here; the same goes for update and run/NAME.image. The
# environment comes from a file, so that no value of it is in this script, which
# Slurm keeps a copy of, or on a command line, which everybody can read. The file
# may add words that come before the runtime.
contain() {
	read -r pid rest </proc/self/stat # this subshell's own, which $$ is not
	printf '%s\n%s\n%s\n' "$pid" "$3" "$using" >"run/$2"
	[ ! -s run/pod.stop ] || exit 143
	if [ -s "run/$2.image" ]; then
		read -r image <"run/$2.image"
		[ "$image" = "$using" ] || exit 143
	fi
	# The runtime hands on these of the machine's environment, whatever it is told.
	unset TERM http_proxy HTTP_PROXY https_proxy HTTPS_PROXY no_proxy NO_PROXY all_proxy ALL_PROXY ftp_proxy FTP_PROXY
	carry=''
	# shellcheck source=/dev/null
	. "./env/$2" || exit 125
	"container_$1"
}

# ---- Images ----
# ../../images has them, for all pods of this user: ref.<key> says which image file
# a reference is, sha256.<digest>.sif is that file, sha256.<digest>.used changes when
# somebody uses it. A container runs from a hard link in the pod's own directory, so
# no registry is asked at a start, and what is removed from there hurts nobody.
# run/pull.sh brings what is missing.

images=../../images

# bring NUMBER NAME: sets sif to the container's image; false when the pod is to end
# before. A pull that fails is tried again and again, as a kubelet does.
bring() {
	pause=$backoff
	while
		! renewed "$2" || pause=$backoff
		! "image_$1" && [ -z "$ended" ]
	do
		[ -z "$cut" ] || continue # another image: at once
		note "$fault"
		rest 1
		if [ -z "$ended$cut" ]; then
			case $fault in pullfailed*) note pullwait "$2" "$pause" ;; esac
			[ "$pause" -le 1 ] || rest $((pause - 1))
		fi
		[ -z "$ended" ] || break
		pause=$((pause * 2))
		[ "$pause" -le 300 ] || pause=300
	done
	rc=0
	[ -z "$ended" ] || rc=143
}

# fetch NAME KEY POLICY REFERENCE MANIFEST BYDIGEST [OPTION]: sees to it that the
# image is in the cache, as imagePullPolicy says; else sets fault to a fact.
fetch() {
	case $3 in
	Always) ;;
	*)
		if [ "$have" = "$2" ] || take "$1" "$2"; then return 0; fi
		if [ "$3" = Never ]; then
			fault="neverpull $1"
			return 1
		fi
		;;
	esac
	note pull "$1"
	clock
	began=$clock
	scratch=${scratch:-} sh run/pull.sh "$@" </dev/null >"msg/$1.pull" 2>&1 &
	pull=$!
	[ -z "$ended$cut" ] || halt
	# At least once: a shell may have reaped it by now, and then only wait knows.
	while
		wait "$pull"
		rc=$?
		kill -0 "$pull" 2>/dev/null
	do :; done
	pull=''
	fault="pullfailed $1 $rc"
	[ "$rc" -eq 0 ] || return 1
	if ! take "$1" "$2"; then # it was removed at this very moment
		echo 'FATAL: the image was pulled and is not in the cache' >"msg/$1.pull"
		fault="pullfailed $1 1"
		return 1
	fi
	read -r took <"run/$1.pulled"
	clock
	note pulled "$1" "$took" $(((clock - began) * 10)) $((size / 1024))
}

# take NAME KEY: gives the container the image that the cache has for it, if it has
# one: it is looked for in the listing of the directory, as a shared file system may
# remember of a name that it was not there.
take() {
	name=$1 have=$2
	set -- "$images/ref.$2"*
	if [ ! -r "$1" ]; then
		have=''
		return 1
	fi
	# shellcheck disable=SC2034 # what container_1 … need of it differs
	action=run entrypoint='' cmd='' workdir='' user='' kind='' hex='' size=0
	# shellcheck source=/dev/null
	. "$1"
	sif=$dir/run/$name.sif
	if ! ln -f "$images/sha256.$hex.sif" "$sif" 2>/dev/null; then
		sif=$dir/$images/sha256.$hex.sif # another file system, or one without links
		set -- "$sif"*
		if [ "$1" != "$sif" ]; then
			have=''
			return 1
		fi
		echo >"$images/nolinks" # so nobody knows what is in use
	fi
	echo >"$images/sha256.$hex.used"
}

# idle: an image that has no program is a container that cannot start.
idle() {
	echo 'knoc: no command specified: the pod names none, and its image has neither ENTRYPOINT nor CMD' >&2
	exit 128
}

# ---- Scratch on this node ----
# What containers write outside of their volumes lies in a directory of this machine that nobody
# else can enter. It goes with the pod. A job that was killed leaves it behind, for
# the next pod here to remove: its name says which process it belongs to.

scratch='' holder='' session=''

# born PID: sets start to when the process started; empty: there is none.
born() {
	start=''
	{ read -r line <"/proc/$1/stat"; } 2>/dev/null || return 0
	# shellcheck disable=SC2086 # numbers, after the program's name
	set -- ${line##*) }
	start=${20}
}

# wipe DIRECTORY…: removes them, whatever modes the containers gave to what is in
# them.
wipe() {
	rm -rf "$@" 2>/dev/null && return
	chmod -R u+rwx "$@" 2>/dev/null
	rm -rf "$@" 2>/dev/null
}

# shelter DIRECTORY: sets place to a name for the pod's directory, in one of this
# user's alone below a directory that everybody may write to. Removes what is
# there of jobs that are no more.
shelter() {
	while read -r key me rest; do
		case $key in Uid:) break ;; esac
	done </proc/self/status
	base=$1/knoc-$me
	[ -d "$base" ] || mkdir "$base" 2>/dev/null
	# Anybody can make that name there before.
	# shellcheck disable=SC3067 # -O: dash, bash and busybox have it
	if ! { [ -d "$base" ] && [ ! -L "$base" ] && [ -O "$base" ]; }; then
		base=$(mktemp -d "$base.XXXXXX") || return
	fi
	born $$
	place=$base/$SLURM_JOB_ID.$$.$start
	for old in "$base"/*.*.*; do
		pid=${old%.*}
		pid=${pid##*.}
		case $pid in '' | *[!0-9]*) continue ;; esac
		born "$pid"
		[ "$start" = "${old##*.}" ] || wreck "$old"
	done
	return 0
}

# prepare: makes the directory.
prepare() {
	# A set-uid runtime lets no user overlay a directory; it does so in a user
	# namespace of ours. Its own tmpfs is small.
	# shellcheck disable=SC2034 # not every container's root can be written to
	overlay=1 tmpfs=''
	runtime=$(command -v 'apptainer')
	if [ -L "$runtime" ]; then runtime=$(readlink -f "$runtime"); fi
	for old in "${runtime%/bin/*}"/lib*/*/bin/starter-suid "${runtime%/bin/*}"/lib*/*/*/bin/starter-suid; do
		[ ! -u "$old" ] || overlay='' tmpfs=1
	done
	base=/tmp
	case $TMPDIR in *[!A-Za-z0-9._/@+~=-]*) ;; /*) base=$TMPDIR ;; esac
	shelter "$base" || return
	scratch=$place
	umask 022 # base keeps others out
	mkdir -p "$scratch" "$scratch/main/dev"
	umask 077
}

# wreck DIRECTORY: removes what a killed job left. It may belong to users that
# need this user's subordinate ids to be removed.
wreck() {
	wipe "$1"
	[ -d "$1" ] || return
	take_ids '' ''
	[ -z "$holder" ] || nsenter -U -t "$holder" -- rm -rf "$1"
	release
}

# take_ids: starts the process that holds a user namespace in which this user is
# root and the subordinate ids are the other users; sets holder to it. If the
# machine cannot, why says what is missing. It is what apptainer --fakeroot does,
# for all containers of a pod in common. $1 and $2: user and group ids beyond the
# number of subordinate ids; each one takes the place of one at the end.
# shellcheck disable=SC2034 # why: not every pod asks
take_ids() {
	[ -z "$holder" ] || return 0
	why=tools
	if ! { command -v newuidmap && command -v newgidmap && command -v nsenter; } >/dev/null; then return; fi
	name=$(id -un)
	why=subuid
	range /etc/subuid "$1" || return 0
	uids=$map
	range /etc/subgid "$2" || return 0
	why=namespace
	# A sleep without this shell's traps, which no signal to the whole job ends.
	(
		trap '' TERM HUP INT USR1 USR2
		exec unshare -U sleep 2147483647
	) </dev/null >/dev/null 2>&1 &
	holder=$!
	# shellcheck disable=SC3013 # -ef: dash, bash and busybox have it
	while [ "/proc/$holder/ns/user" -ef /proc/self/ns/user ]; do :; done
	# shellcheck disable=SC2046,SC2086 # words are wanted
	if newuidmap "$holder" 0 "$me" 1 $uids && newgidmap "$holder" 0 $(id -g) 1 $map; then
		why=''
	else
		release
	fi
} 2>/dev/null

release() {
	[ -z "$holder" ] || kill -KILL "$holder"
	holder=''
} 2>/dev/null

# range FILE IDS: sets map to newuidmap's words for the user's range in the file.
range() {
	first='' total=0
	while IFS=: read -r key from many; do
		case $key in "$name" | "$me") first=$from total=$many && break ;; esac
	done <"$1"
	if [ -z "$first" ]; then # the site may keep them elsewhere
		case $1 in *uid) map=$(getsubids "$name") ;; *) map=$(getsubids -g "$name") ;; esac
		IFS=' ' read -r key from first total rest <<-IDS
			$map
		IDS
	fi
	case $first$total in '' | *[!0-9]*) return 1 ;; esac
	map=''
	for id in $2; do
		if [ "$id" -gt "$total" ]; then
			total=$((total - 1))
			map="$map $id $((first + total)) 1"
		fi
	done
	[ "$total" -gt 0 ] || return 1
	map="1 $first $total$map"
}

# fresh NAME: an empty root for the next run of the container.
fresh() {
	[ "$attempt" = 0 ] || wipe "$scratch/$1"
	[ -d "$scratch/$1" ] || mkdir "$scratch/$1"
}

# layout: sets session to the directory in which the runtime lays out a container's
# file system. It lies beside the runtime, or else that is asked. A set-uid one is
# not relied upon to mount from there.
layout() {
	[ -n "$overlay" ] || return 0
	prefix=${runtime%/bin/*} name=${runtime##*/}
	[ "$prefix" != /usr ] || prefix=''
	for old in "$prefix/var/lib/$name" "$prefix/var/$name"; do
		[ ! -d "$old/mnt/session" ] || session="$session $old/mnt/session"
	done
	session=${session# }
	case $session in
	'' | *[!A-Za-z0-9._/@+~=-]*) session=$("$runtime" buildcfg SESSIONDIR 2>/dev/null) ;;
	esac
	case $session in *[!A-Za-z0-9._/@+~=-]* | [!/]*) session='' ;; esac
}

# devices NAME FILE DIRECTORY…: makes the container's /dev, of links to the
# devices that the runtime has for it in .d; the file, if its name is not empty,
# and the directories are for what is mounted there.
devices() {
	[ -n "$session" ] || return 0
	dev=$scratch/$1/dev file=$2
	shift 2
	umask 022
	[ -d "$dev" ] || mkdir "$dev"
	for name; do mkdir -p "$dev/$name"; done
	case $file in */*) mkdir -p "$dev/${file%/*}" ;; esac
	[ -z "$file" ] || true >"$dev/$file"
	set --
	for file in /dev/nvidia* /dev/dri /dev/kfd; do
		[ ! -e "$file" ] || set -- "$@" ".d/${file##*/}"
	done
	ln -s .d/fd .d/mqueue .d/null .d/ptmx .d/pts .d/random .d/shm .d/stderr .d/stdin .d/stdout .d/tty .d/urandom .d/zero "$@" "$dev" 2>/dev/null # a directory of ours keeps its place
	umask 077
}

app() { # NUMBER NAME POLICY
	[ -z "$stopping$failed" ] || return
	supervise "$@" &
	member=$2:$!
	apps="$apps $member"
}

container_1() { # main
	fresh main
	devices main termination-log
	set -- 'sh' '-c' 'echo "$GREETING" '"${APPTAINERENV_GREETING-\$(GREETING)}"', '"${APPTAINERENV_POD_IP-\$(POD_IP)}"
	# shellcheck disable=SC2086 # words are wanted, or none
	exec $carry 'apptainer' --silent exec \
		--containall --no-eval --no-umask --hostname 'env-mounts' \
		${overlay:+--overlay "$scratch/main"} ${tmpfs:+--writable-tmpfs} --workdir "$scratch/main" --pwd '/data' \
		${session:+--mount type=bind,source="$scratch/main/dev",destination=/dev --mount type=bind,source="$session/dev",destination=/dev/.d} \
		--mount 'type=bind,source=/home/user/.knoc/knoc-c1/6c2f1a52-0000-4000-8000-000000000004/vol/scratch,destination=/data' \
		--mount 'type=bind,source=/home/user/.knoc/knoc-c1/6c2f1a52-0000-4000-8000-000000000004/vol/settings,destination=/data/etc/my settings,ro' \
		--mount 'type=bind,source=/home/user/.knoc/knoc-c1/6c2f1a52-0000-4000-8000-000000000004/run/pod.hosts,destination=/etc/hosts' \
		${session:+--mount 'type=bind,source=/home/user/.knoc/knoc-c1/6c2f1a52-0000-4000-8000-000000000004/msg/main,destination=/dev/termination-log'} \
		"$sif" "$@"
}
image_1() {
	fetch main baf89a2296458dd276bcb256a35636c5 Always 'docker://busybox' 'https://registry-1.docker.io/v2/library/busybox/manifests/latest' 'docker://busybox@'
}

names='main' # the last first
highest=1

# ---- Where it runs ----

# reachable WORD…: sets ips to the first IPv4 and the first IPv6 address among
# the words that another machine can reach (the API allows one of each kind).
reachable() {
	v4='' v6=''
	for ip; do
		case $ip in
		127.* | ::1 | [Ff][Ee]80:* | *[!0-9A-Fa-f.:]*) ;;
		*:*) v6=${v6:-$ip} ;;
		*[!0-9.]*) ;;
		*.*.*.*) v4=${v4:-$ip} ;;
		esac
	done
	ips=$v4${v6:+ $v6}
	ips=${ips# }
}

if ! { [ -d log ] && [ -d run ] && [ -d cmd ] && [ -d msg ]; }; then mkdir -p log run cmd msg; fi
true >run/pod.stop # a requeued job finds what its first run left
for name in $names; do
	true >"run/$name"
	true >"run/$name.end"
done

host=''
read -r host </proc/sys/kernel/hostname
case $host in '' | *[!A-Za-z0-9._-]*) host=unknown ;; esac
# shellcheck disable=SC2046 # words are wanted
{
	reachable $(hostname -I 2>/dev/null)
	[ -n "$ips" ] || reachable $(hostname -i 2>/dev/null)
	[ -n "$ips" ] || reachable $(getent ahosts "$host" 2>/dev/null)
}

# What env/<container> may refer to.
KNOC_POD_IP=${ips%% *}
KNOC_POD_IPS=${ips%% *}${v4:+${v6:+,$v6}}
# shellcheck disable=SC2034
KNOC_HOST_IP=$KNOC_POD_IP KNOC_HOST_IPS=$KNOC_POD_IPS

# The file in which the kernel counts the kills for memory of this job's cgroup, as
# version 2 has it and version 1.
memory=''
while IFS=: read -r number kinds path; do
	case ,$kinds, in
	,,) file=/sys/fs/cgroup$path/memory.events ;;
	*,memory,*) file=/sys/fs/cgroup/memory$path/memory.oom_control ;;
	*) continue ;;
	esac
	[ ! -r "$file" ] || memory=$file
done </proc/self/cgroup

# What the runtime would take from the environment of the job is not the pod's.
set -f
IFS='
'
for line in $(export -p); do
	line=${line#export }
	line=${line#declare -x } # bash without its POSIX mode
	line=${line%%=*}
	case $line in
	*[!A-Za-z0-9_]*) ;;
	APPTAINER_CACHEDIR | APPTAINER_TMPDIR | SINGULARITY_CACHEDIR | SINGULARITY_TMPDIR) ;;
	APPTAINER* | SINGULARITY*) unset "$line" ;;
	esac
done
set +f
unset IFS

# ---- The pod ----

clock
begun=$clock
trap 'woken=1 term=1' TERM
trap 'woken=1' USR1
trap '' USR2 # is for supervisors, once they have a trap for it
ticker </dev/null >/dev/null 2>&1 &
ticker=$!
note "claim $SLURM_JOB_ID%n%s host $host${ips:+ $ips}"
# The containers' own hosts file: the machine's and their host name.
umask 022
{
	cat /etc/hosts
	for ip in $ips; do echo "$ip	env-mounts"; done
} >run/pod.hosts
umask 077
prepare
layout

woken=1 # commands may have come before this job started
attend
app 1 'main' Never

result=0
[ -n "$apps" ] || result=1
for member in $apps; do
	await "$member"
	[ "$rc" -eq 0 ] || result=1
done

# The pod's work is done: ephemeral containers go, and sidecars, the last first.
if [ -n "$sidecars$guests" ] && [ -z "$stopping" ]; then
	closing=1 woken=1
	stop "$grace" stop
fi
for member in $sidecars $guests; do await "$member"; done

calm
kill -ALRM "$ticker" 2>/dev/null
if [ -n "$scratch" ]; then
	wipe "$scratch"
	rmdir "${scratch%/*}" 2>/dev/null
fi
release
note 'done' "$result"
wait "$ticker"
exit "$result"
