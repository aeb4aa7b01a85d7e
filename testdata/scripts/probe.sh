#!/bin/sh
# Probes of pod default/test
# uid 0b9f4b2e-0001
#
# Written by knoc. pod.sh starts this script beside each container that has
# probes. It looks after the container as the kubelet would (initial delay,
# period, thresholds), and appends what it finds to the pod's journal.
#
#   sh run/probe.sh NAME ATTEMPT PID              until process PID, the container's runtime, ends
#   sh run/probe.sh --once NAME ATTEMPT KIND      one probe; exit 0 passed, 1 failed, 2 passed with a warning, 3 too early
#   sh run/probe.sh --hook NAME post|pre          an HTTP lifecycle hook; says why it failed
#
# exec probes enter the container by run/enter.sh. The others need nothing but curl
# on the compute node; without it they fail.

# shellcheck disable=SC2016,SC2034,SC2317 # text in quotes is the pod's; settings are for all probes; check calls by name

dir='/home/hpcuser/.knoc/knoc-c1/u-1'
uid='0b9f4b2e-0001'
second=100 # hundredths of a second in one
PATH=${PATH:-/usr/local/bin:/usr/bin:/bin}
umask 077
cd "$dir" || exit 1
newline='
'

# settings NAME KIND: sets what the pod says of that probe.
settings() {
	case "$1 $2" in
	'a startup')
		number=1 delay=0 period=2 limit=1 passes=1 failures=30 grace=30
		late='command timed out: "cat /tmp/up  $(NONE) $(FILE) it'\''s \"$(id)\" `id` \\ \n# END" timed out after 1s'
		;;
	'a readiness')
		number=1 delay=5 period=10 limit=3 passes=2 failures=3 grace=30
		late=''
		;;
	'a liveness')
		number=1 delay=0 period=10 limit=1 passes=1 failures=3 grace=7
		late=''
		;;
	'b liveness')
		number=2 delay=0 period=10 limit=1 passes=1 failures=3 grace=30
		late=''
		;;
	*) return 1 ;;
	esac
}

# check NAME KIND: one probe, or a hook.
check() {
	case "$1 $2" in
	'a startup') inside 'cat' '/tmp/up' '' '$(NONE)' '$(FILE)' 'it'\''s "$(id)" `id` \ 
# END' ;;
	'a readiness') http 'https' '' '8080' '/a%20b?c=%22d%22%20$(id)' 'header = "Host: example.org"
header = "X-A: a\\n\"$(id)'\''"
header = "X-Empty;"
header = "Accept:"
header = "User-Agent: kube-probe/1.37"
' ;;
	'a liveness') grpc 'http' '9000' '\000\000\000\000\006\012\004\151\164\047\163' ;;
	'b liveness') tcp '' '81' ;;
	'a post') http 'http' '192.0.2.1' '80' '/started' 'header = "Connection: close"
header = "User-Agent: kube-lifecycle/1.37"
header = "Accept: */*"
' ;;
	'b pre') invalid ;;
	*) return 1 ;;
	esac
}

# clock sets clock to hundredths of a second since boot: it costs no process and
# nobody sets it back.
clock() {
	read -r clock rest </proc/uptime
	clock=${clock%.*}${clock#*.}
}

# decimal HUNDREDTHS: sets decimal to the same in seconds.
decimal() {
	rest=$(($1 % 100))
	[ "$rest" -ge 10 ] || rest=0$rest
	decimal=$(($1 / 100)).$rest
}

# ---- One probe ----
# Each of these sets text to what there is to say.

# inside PROGRAM ARGUMENT…: runs a program in the container. Its output is read to
# its end and kept as far as an event can show it. A container whose first
# program does not run yet is no failure.
inside() {
	text=$(
		exec 3>&1
		rc=$({
			{ sh ./run/enter.sh "$name" -- "$@" </dev/null 2>&1 3>&- 4>&-; echo $? >&4; } |
				{ head -c 1024 | tr -d '\000'; cat >/dev/null; } >&3
		} 4>&1)
		exit "${rc:-1}"
	)
	rc=$?
	case $rc,$text in
	0,*) return 0 ;;
	125,"knoc: container $name is not running"*) return 3 ;;
	esac
	return 1
}

# address HOST: sets host to it, or to the pod's address, as in a URL.
address() {
	host=${1:-${KNOC_POD_IP:-127.0.0.1}}
	case $host in *:*) host="[$host]" ;; esac
	command -v curl >/dev/null && return
	read -r text </proc/sys/kernel/hostname
	text="curl is not installed on the compute node $text: knoc needs it for every probe and hook but exec"
	return 1
}

# remaining sets seconds to what is left of the probe's time, for curl; a hook has
# no limit of its own.
remaining() {
	seconds=0
	[ -n "$deadline" ] || return 0
	clock
	left=$((deadline - clock))
	[ "$left" -gt 0 ] || left=1
	decimal "$left"
	seconds=$decimal
}

# curl is told by its standard input, since everybody can read a command line and
# headers may be secret. ~/.curlrc and proxies are not for probes.
plain='silent
show-error
globoff
path-as-is
insecure
noproxy = "*"
proto = "=http,https"
output = "/dev/null"
max-filesize = 10240
write-out = "\n%{http_code} %{size_download} %{redirect_url}"'

# failure TEXT: sets why to what curl says of its exit code rc, in its output out,
# or to TEXT when there was nobody at the pod's own address to answer.
failure() {
	why=${out%%"$newline"*}
	why=${why#curl: (*) }
	if [ "$rc" = 7 ] && [ -n "$1" ]; then why=$1; fi
}

# nameof URL: sets hostname to that of the URL.
nameof() {
	hostname=${1#*://}
	hostname=${hostname%%[/?#]*}
	hostname=${hostname##*@}
	case $hostname in
	'['*) hostname=${hostname%%]*} ;;
	*) hostname=${hostname%%:*} ;;
	esac
}

# http SCHEME HOST PORT TARGET CONFIGURATION: any answer from 200 to 399 is good;
# for a hook any answer is. The body is of no interest, and no more than 10 kB of
# it is waited for. A redirect is followed on the same host only.
http() {
	address "$2" || return 1
	url=$1://$host:$3$4 hops=1
	nameof "$url"
	first=$hostname
	refused=''
	[ -n "$2" ] || refused="dial tcp $host:$3: connect: connection refused"
	while :; do
		remaining
		out=$(
			curl -q -K - 2>&1 <<-END
				$plain
				$5
				max-time = $seconds
				url = "$url"
			END
		)
		rc=$?
		answer=${out##*"$newline"} # code, bytes of the body, where a redirect leads
		case $answer in [1-9][0-9][0-9]\ [0-9]*) ;; *) answer='000 0 ' ;; esac
		code=${answer%% *}
		answer=${answer#* }
		size=${answer%% *}
		next=${answer#* }
		why=''
		case $rc,$code in
		0,[1-9]* | 63,[1-9]*) ;;
		28,*)
			[ "${size%.*}" -ge 10240 ] ||
				why='context deadline exceeded (Client.Timeout exceeded while awaiting headers)'
			;;
		*) failure "$refused" ;;
		esac
		case $why,$code,$next in
		,30[12378],http*)
			nameof "$next"
			if [ "$hostname" = "$first" ]; then
				url=$next
				case $hops,$next in
				10,*) why='stopped after 10 redirects' ;;
				*[\"\\]*) why='invalid character in the URL' ;;
				*)
					hops=$((hops + 1))
					continue
					;;
				esac
			fi
			;;
		esac
		break
	done
	if [ -n "$why" ]; then
		text="Get \"$url\": $why"
		return 1
	fi
	[ -z "$hook" ] || return 0
	case $code in
	2*) return 0 ;;
	3*)
		text="Probe terminated redirects, Location: $next"
		return 2
		;;
	esac
	text="HTTP probe failed with statuscode: $code"
	return 1
}

# tcp HOST PORT: opens a connection and sends nothing. curl's telnet would wait for
# the server then; an option that it does not know ends it as soon as it has
# connected.
tcp() {
	address "$1" || return 1
	remaining
	out=$(curl -q -sS -g --noproxy '*' -m "$seconds" -t KNOC= -w '\n%{time_connect}' "telnet://$host:$2" 2>&1 </dev/null)
	rc=$?
	case ${out##*"$newline"} in [0-9]*[1-9]* | [1-9]*.*) return 0 ;; esac
	if [ "$rc" = 28 ]; then
		why='i/o timeout'
	else
		failure 'connect: connection refused'
	fi
	text="dial tcp $host:$2: $why"
	return 1
}

# invalid is a hook that the kubelet does not run either.
invalid() {
	text='Cannot run handler: invalid handler'
	return 1
}

# grpc SCHEME PORT REQUEST: calls Check of grpc.health.v1.Health; the request is
# for printf. In out the answer's bytes up to 8 become digits, so that the message
# SERVING is "0000281" (not compressed, 4 bytes of length, field 1, value 1), and a
# blank ends each header.
grpc() {
	address '' || return 1
	remaining
	case $1 in http) set -- "$@" --http2-prior-knowledge ;; *) set -- "$@" --http2 ;; esac
	# shellcheck disable=SC2059 # octal numbers
	out=$(
		{
			printf "$3" | curl -q -sS -g -k -i "$4" --noproxy '*' -m "$seconds" -A 'kube-probe/1.37' \
				-H 'Content-Type: application/grpc' -H 'TE: trailers' --data-binary @- \
				"$1://$host:$2/grpc.health.v1.Health/Check" 2>&1
			echo "${newline}curl $?"
		} | head -c 8192 | tr '\000-\010\015' '0-8 '
	)
	rc=${out##*"${newline}curl "}
	why=''
	case $rc,$out in
	0,*'grpc-status: '[0-9]*) ;;
	28,*) why="timeout: health rpc did not complete within ${limit}s" ;;
	7,*) why="error: failed to connect service at \"$host:$2\": connection refused" ;;
	0,*) why="error: health rpc probe failed: the answer is not one of gRPC" ;;
	*)
		failure ''
		why="error: health rpc probe failed: $why"
		;;
	esac
	text=$why
	[ -z "$why" ] || return 1
	status=${out##*grpc-status: }
	status=${status%%[!0-9]*}
	body=${out#*"$newline $newline"}
	case $status,$body in
	0,0000281*) return 0 ;;
	0,0000282*) text='service unhealthy (responded with "NOT_SERVING")' ;;
	0,0000283*) text='service unhealthy (responded with "SERVICE_UNKNOWN")' ;;
	0,*) text='service unhealthy (responded with "UNKNOWN")' ;;
	*)
		case $out in *'grpc-message: '*)
			why=${out##*grpc-message: }
			why=${why%%"$newline"*}
			why=${why% }
			;;
		esac
		case $status in
		5) status=NotFound ;;
		12) status=Unimplemented ;;
		14) status=Unavailable ;;
		esac
		text="error: health rpc probe failed: rpc error: code = $status desc = $why"
		[ "$status" != Unimplemented ] ||
			text="error: this server does not implement the grpc health protocol (grpc.health.v1.Health): $why"
		;;
	esac
	return 1
}

name=$2 attempt=$3 kind=$4 text='' hook='' deadline=''
case $1 in
--once)
	settings "$name" "$kind" || exit 1
	clock
	deadline=$((clock + limit * second))
	check "$name" "$kind"
	rc=$?
	[ "$rc" -eq 0 ] || printf '%.1024s\n' "$text" >"run/$name.$kind"
	exit "$rc"
	;;
--hook)
	hook=1
	check "$name" "$3"
	rc=$?
	[ -z "$text" ] || printf '%.1024s\n' "$text"
	exit "$rc"
	;;
esac

# ---- All the time ----

# What runs besides this shell is in busy: a sleep, or one probe, which is a
# process group of its own, so that the program in the container ends with it.
# KILL ends both at once. A signal that comes while busy is being set leaves its
# flag.
cut() {
	[ -z "$busy" ] || kill -KILL "-$busy" || kill -KILL "$busy"
} 2>/dev/null

# pause HUNDREDTHS
pause() {
	decimal "$1"
	sleep "$decimal" &
	busy=$!
	[ -z "$quit$passed" ] || cut
	wait "$busy"
	busy=''
}

# note WORD ARGUMENT…: as in pod.sh; each probe is a writer of its own.
note() {
	date "+%s $*" >>"$journal" || date "+%s $*" >>"$journal"
	mark
}

mark() {
	count=$((count + 1))
	last=$marker
	marker=../changed/$uid.$restart-$writer.$count
	true >"$marker"
	if [ -n "$last" ] && [ -e "$last" ]; then rm -f "$last"; fi
}

# once runs one probe and sets rc to what came of it. timeout is the last resort
# for curl, which knows its own limit and says more when it is over.
once() {
	most=$((limit * second))
	[ -n "$late" ] || most=$((most + second))
	decimal "$most"
	setsid timeout -s KILL "$decimal" sh ./run/probe.sh --once "$name" "$attempt" "$kind" </dev/null &
	busy=$!
	[ -z "$quit" ] || cut
	wait "$busy"
	rc=$?
	if [ -n "$quit" ] || [ "$rc" -gt 3 ]; then cut; fi
	busy=''
	case $rc in
	[0-3]) ;;
	137)
		rc=1
		printf '%.1024s\n' "${late:-the probe did not end in time}" >"run/$name.$kind"
		;;
	*)
		echo "the probe could not be run on the compute node (exit code $rc): it needs setsid, timeout and sh" >"run/$name.$kind"
		rc=1
		;;
	esac
}

# report COUNT: tells of a failure, COUNT times in a row by now; 0 is a warning.
# The first three are told, and one a minute of the others; of a probe that comes
# and goes no more than three a minute, for the journal must not grow without end.
report() {
	clock
	[ $((clock - window)) -lt $((60 * second)) ] || window=$clock told=0
	[ "$told" -lt 3 ] || return 0
	if [ "$1" -gt 3 ]; then
		[ "$told" -eq 0 ] || return 0
		told=3
	fi
	told=$((told + 1))
	mv -f "run/$name.$kind" "msg/$name.$attempt.$kind" && note unhealthy "$name" "$attempt" "$kind" "$1"
}

# turn READY: tells that readiness has changed. The journal takes the first turns of
# a run, and then the word that a file has the newest one from there on: a probe may
# come and go every second for weeks.
turn() {
	ready=$1 turns=$((turns + 1))
	if [ "$turns" -le 20 ]; then
		note ready "$name" "$attempt" "$ready"
		return
	fi
	echo "$ready" >"run/$name.turn"
	mv -f "run/$name.turn" "msg/$name.$attempt.turn"
	if [ "$turns" -eq 21 ]; then note turns "$name" "$attempt"; else mark; fi
}

# probing KIND: one probe of this container over and over; in a subshell. The
# thresholds are the kubelet's (doProbe in pkg/kubelet/prober/worker.go). A startup
# probe ends when it has passed or failed for good, a liveness probe in the latter
# case.
probing() {
	kind=$1
	writer=p$number${kind%"${kind#?}"}$attempt count=0 marker=''
	busy='' quit='' passed='' ready=0 was='' row=0 window=-100000 told=0 turns=0
	trap 'quit=1; cut' TERM
	clock
	due=$((began + delay * second))
	[ "$due" -ge "$clock" ] || due=$clock
	while :; do
		clock
		[ "$due" -le "$clock" ] || pause $((due - clock))
		[ -z "$quit" ] || break
		once
		[ -z "$quit" ] || break
		clock
		if [ "$rc" = 3 ] && [ $((clock - began)) -lt $((10 * second)) ]; then
			pause $((second / 5)) # the container's first program does not run yet
			continue
		fi
		row=$((row + 1))
		case $rc,$was in 0,0 | [13],1 | 2,0) ;; *) row=1 ;; esac
		case $rc in
		0 | 2)
			was=0
			[ "$rc" = 0 ] || report 0
			if [ "$row" -ge "$passes" ] && good; then return; fi
			;;
		*)
			was=1
			report "$row"
			if [ "$row" -ge "$failures" ] && bad; then return; fi
			;;
		esac
		# As a Go ticker: a slow probe does not shift the others, and at most one
		# that was missed is made up for.
		clock
		due=$((due + period * second))
		while [ $((due + period * second)) -le "$clock" ]; do due=$((due + period * second)); done
	done
	if [ "$ready" = 1 ] && alive; then turn 0; fi
}

# good and bad: what follows when the probe has come to that threshold; succeed if
# it is over for this container.
good() {
	case $kind in
	readiness)
		[ "$ready" = 1 ] || turn 1
		;;
	startup)
		note started "$name" "$attempt"
		true >"run/$name.started"
		kill -USR1 $$ # the shell that has started this one
		kill -USR1 "$KNOC_SUPERVISOR"
		return 0
		;;
	esac
	return 1
}

bad() {
	if [ "$kind" = readiness ]; then
		[ "$ready" = 0 ] || turn 0
		return 1
	fi
	echo "$grace $kind" >"run/$name.kill.new"
	mv -f "run/$name.kill.new" "run/$name.kill"
	kill -USR1 "$KNOC_SUPERVISOR"
	return 0
}

# begin KIND: fails where the container has no such probe.
begin() {
	settings "$name" "$1" || return
	probing "$1" &
	crew="$crew $!"
}

alive() { [ -d "/proc/$pid" ]; }

name=$1 attempt=$2 pid=$3
restart=${KNOC_RESTART_COUNT:-0}
journal=journal.$restart
crew='' busy='' quit='' passed='' others=''

# The container's start is that of its runtime's process: field 22 of its stat, in
# hundredths of a second since boot, as clock has them.
{ read -r text <"/proc/$pid/stat"; } 2>/dev/null || exit 0
set -f
# shellcheck disable=SC2086 # words are wanted
set -- ${text##*) }
set +f
began=${20}

trap 'quit=1; cut' TERM
trap 'passed=1; cut' USR1
if ! begin startup; then
	begin readiness
	begin liveness
fi
while [ -n "$crew" ] && [ -z "$quit" ] && alive && [ ! -s run/pod.stop ]; do
	pause "$second"
	if [ -n "$passed" ] && [ -z "$others" ]; then
		others=1 passed='' crew=''
		begin readiness
		begin liveness
	fi
done
for member in $crew; do kill -TERM "$member"; done 2>/dev/null
wait
