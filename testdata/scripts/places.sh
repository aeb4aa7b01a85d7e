#!/bin/sh
# sh places.sh NUMBER VOLUMES ROOM PROGRAM [ARGUMENT…]
#
# Written by knoc: finds what container NUMBER is to see of the pod's volumes in
# the directory VOLUMES, where that is less than a whole volume, leaves it at
# run/pod.places/NUMBER.…, and becomes PROGRAM, the container's runtime.
#
# A container may have put a link there that leads anywhere, and may replace
# what is there at any moment. So each path is gone to first, and then the kernel
# says where that is: it must be within the volume. In a container's own room, a
# namespace with mounts of its own that ROOM has made, what was found is mounted
# at its place, and compared with it once more; nobody can replace that. Where the
# machine allows no such room (ROOM is empty), the place is a link to what was found.

dir='/home/hpcuser/.knoc/knoc-c1/u-1'
umask 077
number=$1 volumes=$2 room=$3
shift 3
cd "$dir" || exit 128
case $volumes in /*) ;; *) volumes=$dir/$volumes ;; esac

# lost TEXT: the container cannot start, and its status says why.
lost() {
	printf %s "$1" >"$dir/msg/$name"
	true >"$dir/run/$name.lost"
	exit 128
}

# inside: this directory is within root, as the kernel names it.
inside() {
	case $(readlink /proc/self/cwd)/ in "$root"/*) ;; *) return 1 ;; esac
}

# here: root is this directory.
here() { root=$(readlink /proc/self/cwd) && root=${root%/}; }

# walk PATH: goes there from here, within root. What is missing becomes a directory,
# if make says so, of the permissions mode, or else of root's own. Sets leaf to the
# last part if that is none.
walk() {
	rest=$1/ leaf=''
	while [ -n "$rest" ]; do
		part=${rest%%/*} rest=${rest#*/}
		case $part in '' | .) continue ;; esac
		[ -z "$leaf" ] || return
		if [ -d "./$part" ]; then
			cd -P "./$part" || return
		elif [ -e "./$part" ] || [ -L "./$part" ]; then
			leaf=$part
		else
			doing='create subPath directory'
			inside || return
			case $make$rest in
			any* | DirectoryOrCreate*)
				[ -n "$mode" ] || mode=$(stat -c %a "$root/.") || return
				# By umask: some mkdir -m is a chmod that follows links.
				(umask "$(printf %o $((0777 & ~0$mode)))" && mkdir "./$part") || [ -d "./$part" ] || return
				cd -P "./$part" || return
				;;
			FileOrCreate)
				(umask 022 && set -C && true >"./$part") || [ -e "./$part" ] || return
				leaf=$part
				;;
			*) return 1 ;;
			esac
		fi
	done
}

# settle: goes on to the directory that has leaf itself, where leaf is a link.
settle() {
	[ -n "$leaf" ] || return 0
	leaf=$(readlink -f "./$leaf") || return
	cd -P "${leaf%/*}/" || return
	leaf=${leaf##*/}
	[ -e "./$leaf" ] && [ ! -L "./$leaf" ]
}

# host BASE PATH TYPE NAME: goes to what this machine has at a path below a directory
# that the administrator allows; why says what is wrong with it.
host() {
	make=$3 mode=755
	case $3 in
	any) why="$4 cannot be made" ;;
	Directory*) why="hostPath type check failed: $4 is not a directory" ;;
	File*) why="hostPath type check failed: $4 is not a file" ;;
	Socket) why="hostPath type check failed: $4 is not a socket file" ;;
	CharDevice) why="hostPath type check failed: $4 is not a character device" ;;
	BlockDevice) why="hostPath type check failed: $4 is not a block device" ;;
	esac
	cd -P "$1" && here && walk "$2" && settle || return
	case $3 in
	Directory*) [ -z "$leaf" ] ;;
	File*) [ -n "$leaf" ] && [ -f "./$leaf" ] ;;
	Socket) [ -n "$leaf" ] && [ -S "./$leaf" ] ;;
	CharDevice) [ -n "$leaf" ] && [ -c "./$leaf" ] ;;
	BlockDevice) [ -n "$leaf" ] && [ -b "./$leaf" ] ;;
	esac || return
	here || return
	root=$root${leaf:+/$leaf}
	why="$4 leads out of what knoc's --host-path and --volume-path allow"
	for known in '/data' ''; do
		[ -n "$known" ] || return
		known=$(cd -P "$known" && readlink /proc/self/cwd) || continue
		known=${known%/}
		case $root/ in "$known"/*) break ;; esac
	done
	why="$4 leads to the files of knoc, of SSH or of the container runtime"
	for known in "${dir%/*/*}" ~/.ssh ~/.apptainer ~/.singularity "$APPTAINER_CACHEDIR" "$SINGULARITY_CACHEDIR"; do
		[ -n "$known" ] || continue
		known=$(cd -P "$known" && readlink /proc/self/cwd) || continue
		case $root/ in "$known"/*) return 1 ;; esac
		case $known/ in "$root"/*) return 1 ;; esac
	done
	return 0
}

# visit VOLUME: goes to what it is; for a file (leaf), to where that is.
visit() {
	leaf='' why=''
	case $1 in
	data) host '/data' 'it'\''s "$(id)" \' any '/data/it'\''s "$(id)" \' ;;
	*) cd -P "$volumes/$1" || return ;;
	esac
} 2>/dev/null

# shellcheck disable=SC3013 # -ef: dash, bash and busybox have it
# hold PLACE PATH: what is at the path in the volume gets to its place.
hold() {
	here && make=any mode='' || return
	if [ -n "$2" ]; then
		[ -z "$leaf" ] && walk "$2" && settle && inside || return
	fi
	if [ -z "$room" ]; then
		here && ln -sfn "$root/$leaf" "$1"
	elif [ -n "$leaf" ]; then
		# The file's number is that of an entry of this directory, not of one
		# that a link leads to.
		true >"$1" && mount --rbind "./$leaf" "$1" && [ "$(stat -c %d:%i "./$leaf")" = "$(stat -c %d:%i "$1")" ]
	else
		mkdir "$1" && mount --rbind . "$1" && [ "$1" -ef . ]
	fi
} 2>/dev/null

# place INDEX VOLUME PATH
place() {
	at=$dir/run/pod.places/$number.$1 doing='prepare subPath'
	case $3 in /*) lost "error SubPath \`$3\` must not be an absolute path" ;; esac
	case /$3/ in */../*) lost "unable to provision SubPath \`$3\`: must not contain '..'" ;; esac
	if ! visit "$2"; then
		lost "MountVolume.SetUp failed for volume \"$2\" : ${why:-it is not there}"
	elif ! hold "$at" "$3"; then
		lost "failed to $doing for volumeMount \"$2\" of container \"$name\""
	fi
	cd "$dir" || exit 128
}

# check VOLUME: fails the pod where there is no such volume.
check() {
	if ! visit "$1"; then
		printf %s "MountVolume.SetUp failed for volume \"$1\" : $why" >"$dir/msg/$1.mount"
		echo "$1" >"$dir/run/pod.lost"
		exit 128
	fi
	cd "$dir" || exit 128
}

# nest WHAT WITHIN PATH: makes something to mount on, a file for a file, at a path
# in a directory of the container. What cannot be made may be there, or the
# runtime says that it is not.
nest() {
	make=DirectoryOrCreate mode='' leaf=''
	if cd -P "$2" && here; then
		if [ -d "$1" ]; then
			walk "$3"
		else
			case $3 in */*) walk "${3%/*}" ;; esac
			[ -z "$leaf" ] && inside && (set -C && true >"./${3##*/}")
		fi
	fi
	cd "$dir" || exit 128
} 2>/dev/null

# need NAME VALUE: a variable that a path is made of.
need() { [ -n "$2" ] || missing="$missing${missing:+, }$1"; }

[ -d run/pod.places ] || mkdir -p run/pod.places
[ -z "$room" ] || mount -t tmpfs -o mode=700 knoc run/pod.places || exit 128

case $number in
0)
	check data
	;;
2)
	name=config
	place 0 cm 'a.conf'
	place 1 cm 'none'
	;;
3)
	name=main
	place 0 e 'deep/er'
	missing=''
	need 'A' "${APPTAINERENV_A-}"
	need 'B' "${APPTAINERENV_B-}"
	need 'no.shell' "${KNOC_ENV_6e6f2e7368656c6c-}"
	[ -z "$missing" ] || lost "missing value for $missing"
	place 1 w "${APPTAINERENV_B-\$(B)}"'/'"${APPTAINERENV_A-\$(A)}"'-$(C)/'"${KNOC_ENV_6e6f2e7368656c6c-\$(no.shell)}"
	nest "$volumes/w" run/pod.places/3.0 'w'
	place 3 e 'it'\''s $(id)'
	nest "$at" run/pod.places/3.0 'nested/file'
	;;
esac

# A room of a user namespace of its own has this user as root. The program gets
# one where it is this user again; whoever writes that down has to be outside.
case $room in
*-r*)
	# shellcheck disable=SC2034 # words of no interest
	read -r root uid rest </proc/self/uid_map && read -r root gid rest </proc/self/gid_map || exit 128
	# shellcheck disable=SC3013 # -ef: dash, bash and busybox have it
	( (
		while [ /proc/$$/ns/user -ef /proc/self/ns/user ]; do :; done
		echo "$uid 0 1" >/proc/$$/uid_map && echo "$gid 0 1" >/proc/$$/gid_map
	) </dev/null >/dev/null 2>&1 &)
	exec unshare -U sh -c '
		n=0
		until read -r map </proc/self/gid_map; do
			n=$((n + 1))
			[ $n -lt 1000000 ] || exit 128
		done
		exec "$@"
	' sh "$@"
	;;
esac
exec "$@"
