#!/bin/sh
# sh run/pull.sh NAME KEY POLICY REFERENCE MANIFEST BYDIGEST [OPTION]
#
# Written by knoc: pod.sh runs it for a container's image that is not in the cache
# yet, or may be an old one. REFERENCE is what the runtime pulls, MANIFEST the URL
# at which its registry tells the digest, BYDIGEST what the runtime pulls once that
# is known (both empty: there is no such registry), OPTION one for the runtime's
# pull. env/NAME.pull has the credentials to try, if there are any; none of them is
# ever in an argument. Leaves ../../images/ref.KEY and, in run/NAME.pulled, how many milliseconds
# the runtime's pull took. What goes wrong is on stderr.

umask 077
LC_ALL=C # bytes, in awk
export LC_ALL
name=$1 key=$2 policy=$3 reference=$4 manifest=$5 bydigest=$6 option=$7
runtime='it'\''s "$(id)" \'
images=../../images
lock=$images/lock.$key
hex='' child='' ended='' held='' pulse='' temporary='' hundredths=0

# ---- Ending ----

trap 'ended=1; [ -z "$child" ] || kill "$child"' TERM
trap 'leave $?' EXIT

leave() {
	trap '' TERM
	# shellcheck disable=SC2046 # one word
	[ -z "$pulse" ] || kill -KILL "$pulse" $(cat "$lock/nap")
	[ -z "$temporary" ] || { chmod -R u+rwx "$temporary"; rm -rf "$temporary"; }
	[ -z "$held" ] || rm -rf "$lock"
	exit "$1"
} 2>/dev/null

# run PROGRAM ARGUMENT…: in the background, so that TERM need not wait for its end.
run() {
	"$@" &
	child=$!
	[ -z "$ended" ] || kill "$child" 2>/dev/null
	while
		wait "$child"
		rc=$?
		kill -0 "$child" 2>/dev/null
	do :; done
	child=''
	[ -z "$ended" ] || exit 143
	return "$rc"
}

clock() {
	read -r clock rest </proc/uptime
	clock=${clock%.*}${clock#*.}
}

# ---- What is there ----
# Names are looked for in the directory's listing, as a shared file system may
# remember for a minute that a name was not there.

listed() {
	set -- "$1"*
	[ -e "$1" ]
}

# fresh: the cache has the image, whatever a registry would say.
fresh() { [ "$policy" != Always ] && listed "$images/ref.$key"; }

# known: the image file of that digest is there.
known() { [ -n "$hex" ] && listed "$images/sha256.$hex.sif"; }

# conclude: the reference is the image with digest $hex from now on, if it was not
# so before.
conclude() {
	facts=''
	! listed "$images/ref.$key" || { read -r rest && read -r facts; } <"$images/ref.$key"
	case $facts in "hex=$hex "*) finish ;; esac
	size=$(stat -c %s "$images/sha256.$hex.sif") || exit 1
	describe "$images/sha256.$hex.sif" >"$images/new.$key.$$" && mv -f "$images/new.$key.$$" "$images/ref.$key" || exit 1
	shrink
	finish
}

finish() {
	echo "$((hundredths * 10))" >"run/$name.pulled"
	exit 0
}

# ---- Registries ----

# each PROGRAM: runs it with each of the credentials, until one is good enough, or
# without any where there are none.
each() {
	number=1
	if ! credential 1; then
		"$@"
		return
	fi
	while credential "$number"; do
		! "$@" || return 0
		number=$((number + 1))
	done
	return 1
}

# inquire: sets hex to the digest that the registry has for the reference. It does
# as registries want it: a token comes from where they say. False when that cannot
# be told; the runtime's pull tells why then.
inquire() {
	hex=''
	[ -n "$manifest" ] && command -v curl >/dev/null || return 1
	ask "$login"
	if [ "$code" = 401 ]; then
		case $challenge in
		[Bb]earer\ *realm=\"*) ;;
		*) return 1 ;;
		esac
		realm=${challenge#*realm=\"}
		part service
		service=$part
		part scope
		set -- --data-urlencode "service=$service" --data-urlencode "scope=$part" "${realm%%\"*}"
		token=$(printf '%s\n' "$login" | curl -sS -L -m 20 -K - --get "$@" 2>/dev/null |
			sed -n 's/.*"\(access_\)\{0,1\}token" *: *"\([^"\\]*\)".*/\2/p')
		[ -n "$token" ] || return 1
		ask "header = \"Authorization: Bearer $token\""
	fi
	case $code,$digest in
	200,sha256:*)
		hex=${digest#sha256:}
		hex=${hex%%[!0-9a-f]*} # a carriage return is there, too
		;;
	*) return 1 ;;
	esac
	[ ${#hex} = 64 ] || hex=''
	[ -n "$hex" ]
}

# part NAME: sets part to a value of the challenge, which may be missing.
part() {
	part=''
	case $challenge in
	*"$1=\""*)
		part=${challenge#*"$1=\""}
		part=${part%%\"*}
		;;
	esac
}

# ask LINE: sets code, digest and challenge from the answer of the registry. The
# line is curl's own configuration, with what must not be in an argument.
ask() {
	code='' digest='' challenge=''
	answer=$(printf '%s\n' "$1" | curl -sS -I -L -m 20 -K - \
		-H 'Accept: application/vnd.oci.image.index.v1+json, application/vnd.docker.distribution.manifest.list.v2+json, application/vnd.oci.image.manifest.v1+json, application/vnd.docker.distribution.manifest.v2+json' \
		"$manifest" 2>/dev/null)
	while IFS=' ' read -r word value; do
		case $word in
		HTTP/*) code=${value%% *} ;;
		[Dd]ocker-[Cc]ontent-[Dd]igest:) digest=$value ;;
		[Ww][Ww][Ww]-[Aa]uthenticate:) challenge=$value ;;
		esac
	done <<-ANSWER
		$answer
	ANSWER
}

# ---- One at a time ----
# The lock is a directory, its owner the beat in it: machine, process and when that
# started, and a number that goes up. A beat that stands still for two minutes, seen
# by whoever waits, is a dead owner's: a shared file system shows the past of up to
# one minute, and the clocks of two machines say nothing.

born() {
	start=''
	{ read -r line <"/proc/$1/stat"; } 2>/dev/null || return 0
	# shellcheck disable=SC2086 # numbers, after the program's name
	set -- ${line##*) }
	start=${20}
}

obtain() {
	read -r host </proc/sys/kernel/hostname
	seen='' still=0 without=0
	until trouble=$(mkdir "$lock" 2>&1); do
		if ! listed "$lock"; then # gone by now, or it cannot be made
			without=$((without + 1))
			if [ "$without" -gt 5 ]; then
				echo "FATAL: the image cache cannot be used: $trouble" >&2
				exit 73
			fi
		fi
		beat=''
		{ read -r beat <"$lock/beat"; } 2>/dev/null
		if [ "$beat" != "$seen" ]; then seen=$beat still=0; else still=$((still + 1)); fi
		case $beat in
		"$host "*' '*' '*)
			set -f
			# shellcheck disable=SC2086 # four words
			set -- $beat
			set +f
			born "$2"
			[ "$start" = "$3" ] || still=$patience
			;;
		esac
		if [ "$still" -ge "$patience" ]; then
			mv "$lock" "$images/new.$key.$$" 2>/dev/null && rm -rf "$images/new.$key.$$"
			seen='' still=0
			continue
		fi
		run sleep 1
		! fresh || finish
	done
	held=1
	born $$
	pulsate "$$ $start" </dev/null >/dev/null 2>&1 &
	pulse=$!
}
patience=120

pulsate() {
	trap - TERM EXIT
	number=0
	while [ -d "/proc/$$" ]; do
		echo "$host $1 $number" >"$lock/beat" || break
		number=$((number + 1))
		sleep 10 &
		echo $! >"$lock/nap"
		wait $!
	done
}

# ---- Pulling ----

# attempt DIRECTORY: pulls with that directory for what the runtime puts down
# meanwhile. The cache there is the pull's own: two at once spoil each other's, and
# the digest of what was pulled is in it.
attempt() {
	temporary=$1
	APPTAINER_CACHEDIR=$1 APPTAINER_TMPDIR=$1
	export APPTAINER_CACHEDIR APPTAINER_TMPDIR
	if [ -n "$login" ]; then
		APPTAINER_DOCKER_USERNAME=$username APPTAINER_DOCKER_PASSWORD=$password
		export APPTAINER_DOCKER_USERNAME APPTAINER_DOCKER_PASSWORD
	fi
	# shellcheck disable=SC2086 # one option or none
	run "$runtime" --quiet pull $option "$lock/image.sif" "$source" </dev/null
}

pull() {
	source=$reference
	case $bydigest$hex in
	docker://*@*[0-9a-f]) source=$bydigest'sha256:'$hex ;;
	esac
	clock
	began=$clock
	base=${APPTAINER_TMPDIR:-${SINGULARITY_TMPDIR:-${scratch:-${TMPDIR:-/tmp}}}}
	room=$(mktemp -d "$base/.pull.XXXXXX") || room=$lock/room
	if ! each attempt "$room"; then
		# The node's own disk may be too small for an image that fits at home.
		grep -qiE 'no space left|quota exceeded' "msg/$name.pull" || exit "$rc"
		chmod -R u+rwx "$room" && rm -rf "$room" "$lock/image.sif"
		mkdir "$lock/room" && each attempt "$lock/room" || exit "${rc:-1}"
	fi
	kind=manifest
	[ -n "$hex" ] || hex=$(sed -n 's/.*"digest" *: *"sha256:\([0-9a-f]\{64\}\)".*/\1/p' "$temporary/cache/blob/index.json" 2>/dev/null)
	case $hex in
	*[!0-9a-f]* | '') # several, or none
		kind='file'
		run sha256sum "$lock/image.sif" >"$lock/sum" && read -r hex rest <"$lock/sum" || exit 1
		;;
	esac
	chmod 600 "$lock/image.sif"
	mv -f "$lock/image.sif" "$images/sha256.$hex.sif" || exit 1
	echo >"$images/sha256.$hex.used"
	clock
	hundredths=$((clock - began))
}

# shrink: removes images that were not used for longest until the rest is no more
# than so many KiB. One with a second link is in some pod's directory, and stays.
shrink() {
	limit=1024
	if [ "$limit" = 0 ] || listed "$images/nolinks"; then return; fi
	total=0
	for size in $(stat -c %s "$images"/sha256.*.sif); do total=$((total + size / 1024)); done
	# shellcheck disable=SC2012,SC2045 # names of hexadecimal digits
	for used in $(ls -tr "$images"/sha256.*.used); do
		[ "$total" -gt "$limit" ] || break
		old=${used%.used}
		[ "$old" != "$images/sha256.$hex" ] || continue
		# shellcheck disable=SC2046 # two words
		set -- $(stat -c '%h %s' "$old.sif")
		[ "${1:-1}" = 1 ] || continue
		for ref in "$images"/ref.*; do
			case $(sed -n 2p "$ref") in "hex=${old##*.} "*) rm -f "$ref" ;; esac
		done
		rm -f "$old.sif" "$used"
		total=$((total - ${2:-0} / 1024))
	done
} 2>/dev/null

# describe FILE: prints ref.KEY, shell text that pod.sh reads: which file it is and
# what the image's own configuration says, which the runtime keeps as JSON in it.
describe() {
	printf '# %s\n' "$title"
	echo "hex=$hex kind=$kind size=$size"
	for id in $("$runtime" sif list "$1" | sed -n 's/^ *\([0-9][0-9]*\).*JSON\.Generic.*/\1/p'); do
		"$runtime" sif dump "$id" "$1"
		echo
	done | awk '
		# value: reads one JSON value of s at i. Strings and lists of strings become
		# quoted words in text.
		function value(depth,    c, key, list) {
			blank()
			text = ""
			c = substr(s, i, 1)
			if (c == "\"") {
				text = quoted(string())
				return
			}
			if (c == "{" || c == "[") {
				for (i++; i <= n; ) {
					blank()
					if (index("}]", substr(s, i, 1))) break
					if (c == "{") {
						key = string()
						blank()
						i++ # the colon
						value(depth + 1)
						if (depth == 0) found[key] = text
					} else {
						value(depth + 1)
						list = list " " text
					}
					blank()
					if (substr(s, i, 1) == ",") i++
				}
				i++
				text = substr(list, 2)
				return
			}
			while (i <= n && !index(",}] \t\n", substr(s, i, 1))) i++
		}
		function blank() { while (i <= n && index(" \t\r\n", substr(s, i, 1))) i++ }
		function string(    out, c, code) {
			out = ""
			for (i++; i <= n && (c = substr(s, i, 1)) != "\""; i++) {
				if (c != "\\") {
					out = out c
					continue
				}
				c = substr(s, ++i, 1)
				if (c == "u") {
					code = hex4()
					if (code >= 55296 && code < 56320 && substr(s, i + 1, 2) == "\\u") {
						i += 2
						code = 65536 + (code - 55296) * 1024 + hex4() - 56320
					}
					c = utf8(code)
				} else if (c in escapes) c = escapes[c]
				out = out c
			}
			i++
			return out
		}
		function hex4(    k, code) {
			code = 0
			for (k = 1; k <= 4; k++) code = code * 16 + index("0123456789abcdef", tolower(substr(s, i + k, 1))) - 1
			i += 4
			return code
		}
		function utf8(code) {
			if (code < 1) return ""
			if (code < 128) return sprintf("%c", code)
			if (code < 2048) return sprintf("%c%c", 192 + int(code / 64), 128 + code % 64)
			if (code < 65536) return sprintf("%c%c%c", 224 + int(code / 4096), 128 + int(code / 64) % 64, 128 + code % 64)
			return sprintf("%c%c%c%c", 240 + int(code / 262144), 128 + int(code / 4096) % 64, 128 + int(code / 64) % 64, 128 + code % 64)
		}
		function quoted(t,    k, parts, count, out) {
			count = split(t, parts, "\047")
			out = parts[1]
			for (k = 2; k <= count; k++) out = out "\047\\\047\047" parts[k]
			return "\047" out "\047"
		}
		BEGIN { escapes["n"] = "\n"; escapes["t"] = "\t"; escapes["r"] = "\r"; escapes["b"] = "\b"; escapes["f"] = "\f" }
		{ s = s $0 "\n" }
		END {
			# Of what the file has, the description of the image is what no "data" is in.
			n = length(s)
			for (i = 1; i <= n; ) {
				blank()
				if (substr(s, i, 1) != "{") break
				for (k in found) delete found[k]
				value(0)
				if ("data" in found) continue
				print "action=exec"
				if (found["Entrypoint"] != "") print "entrypoint=" quoted(found["Entrypoint"])
				if (found["Cmd"] != "") print "cmd=" quoted(found["Cmd"])
				if (found["WorkingDir"] != "") print "workdir=" found["WorkingDir"]
				if (found["User"] != "") print "user=" found["User"]
				break
			}
		}'
}

# ---- The work ----

title=${reference#docker://} kind=manifest login='' username='' password=''
credential() { return 1; }
# shellcheck source=/dev/null
[ ! -r "env/$name.pull" ] || . "./env/$name.pull"
[ -d "$images" ] || mkdir -p "$images"
! fresh || finish
if each inquire && known; then conclude; fi
obtain
! fresh || finish
[ -n "$hex" ] || each inquire
known || pull
conclude
