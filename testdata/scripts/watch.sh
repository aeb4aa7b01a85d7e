# knoc's eye: it answers one request a line until knoc goes away. It sleeps in
# read and starts no process while nothing happens, so it costs the login node
# nothing. Requests:
#   marks                      the pods whose journals have grown
#   read UID RESTART OFFSET    the rest of a journal
#   newest UID RESTART         a newer journal, if there is one
#   text UID FILE LIMIT        the beginning of a file in msg/, if it is there; the
#                              end of what a pull said, where its error is
#   done                       the answer to these is complete
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
journal() { # UID RESTART OFFSET
	# Only a name that the directory has is opened: to ask for one that is not
	# there yet would hide it for as long as a shared home remembers that. A file
	# whose size is remembered from before ends there; to have read from it makes
	# the next stat of it, which is tail's, ask the server.
	text=.
	for f in "$1"/journal.*; do
		[ "$f" = "$1/journal.$2" ] || continue
		{ read -r text <"$f"; } 2>/dev/null
		text=$(tail -c "+$(($3 + 1))" "$f" 2>/dev/null; echo .)
	done
	say "journal.$1.$2.$3" "${text%.}"
}
while IFS=' ' read -r verb uid what number; do
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
	read) journal "$uid" "$what" "$number" ;;
	newest)
		# A job that was run again writes another one; it may have been so
		# more than once since somebody looked.
		newest=$what
		for f in "$uid"/journal.*; do
			n=${f##*.}
			case $n in *[!0-9]* | '') continue ;; esac
			[ "$n" -le "$newest" ] || newest=$n
		done
		[ "$newest" = "$what" ] || journal "$uid" "$newest" 0
		;;
	text)
		{ read -r text <"$uid/msg/$what"; } 2>/dev/null
		part='head'
		case $what in *.pull) part='tail' ;; esac
		text=$("$part" -c "$number" "$uid/msg/$what" 2>/dev/null && echo .) && say "text.$uid.$what" "${text%.}"
		;;
	done) say done '' ;;
	esac
done
exit 0
