# knoc's eye: it answers one request a line until knoc goes away. It sleeps in
# read and starts no process while nothing happens, so it costs the login node
# nothing. Requests: marks | read UID RESTART OFFSET | done
# Only the knoc with the highest epoch may change anything here: an older one
# that still runs, or an exchange of it that was held up, ends with 75.
cd '/home/hpcuser/.knoc/knoc-c1' || exit 73
umask 077
fence() {
	set -- epoch/*
	for last; do :; done
	[ "$last" = epoch/1000000001 ] || exit 75
}
fence
while IFS=' ' read -r verb uid restart offset; do
	case $verb in
	marks)
		# Directories are listed through a fresh open; a name is never asked
		# for by stat, since a shared home may remember for a minute that it
		# was not there. The marker goes first, then the journal is read: a
		# line that is added in between leaves a new marker.
		fence
		set --
		for f in changed/*; do
			case $f in 'changed/*') ;; *) set -- "$@" "$f" ;; esac
		done
		[ $# = 0 ] || rm -f "$@"
		say marks "$*"
		;;
	read)
		# A file whose size is remembered from before ends there. To have read
		# from it makes the next stat of it, which is tail's, ask the server.
		{ read -r text <"$uid/journal.$restart"; } 2>/dev/null
		text=$(tail -c "+$((offset + 1))" "$uid/journal.$restart" 2>/dev/null; echo .)
		say "journal.$uid.$restart.$offset" "${text%.}"
		;;
	done) say done '' ;;
	esac
done
exit 0
