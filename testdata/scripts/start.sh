# knoc starts (or starts again) as node knoc: make this node's directory,
# take the next epoch, and tell what is already here.
# Exit: 69 a command is missing, 73 the directory cannot be used, 78 it belongs
# to another cluster's node of this name.
umask 077
root='~/my dir'
case ${root:=${KNOC_DIR:-.knoc}} in
/*) ;;
'~/'*) root=$HOME/${root#'~/'} ;;
*) root=$HOME/$root ;;
esac
missing=
for c in sbatch squeue scancel sinfo timeout tar tail readlink; do
	command -v "$c" >/dev/null 2>&1 || missing="$missing $c"
done
[ -z "$missing" ] || {
	echo "the login node has no$missing in PATH=$PATH" >&2
	exit 69
}
mkdir -p -- "$root" && cd -- "$root" || exit 73

# Another cluster may have a node of the same name. Its pods are invisible by
# path; but where there are only its directories, the cluster's id has probably
# changed under us, and starting afresh would run every pod a second time.
others=
for f in */node; do
	d=${f%/node}
	[ "$d" != 'knoc-c1' ] && read -r owner <"$f" 2>/dev/null && [ "$owner" = 'knoc' ] && others="$others $d"
done
if [ -n "$others" ] && [ ! -d 'knoc-c1' ]; then
	echo "$PWD has directories of node knoc for other cluster ids only:$others; set --cluster-id to the id after the node's name to take them over, or use another --nodename or --remote-dir" >&2
	exit 78
fi
mkdir -p -- 'knoc-c1'/changed 'knoc-c1'/epoch && cd -- 'knoc-c1' || exit 73
: >write.test && rm -f write.test || exit 73
echo 'knoc' >node

# The epoch fences: whoever holds the highest number may change things here.
set -- epoch/*
for last; do :; done
n=${last#epoch/} tries=0
case $n in *[!0-9]* | '') n=1000000000 ;; esac
while n=$((n + 1)) && ! mkdir "epoch/$n" 2>/dev/null; do
	tries=$((tries + 1))
	if [ ! -d "epoch/$n" ] || [ "$tries" -gt 100 ]; then
		echo "cannot make $PWD/epoch/$n" >&2
		exit 73
	fi
done
for e in epoch/*; do
	[ "${e#epoch/}" -lt "$n" ] && rmdir "$e" 2>/dev/null
done
say dir "$PWD"
say epoch "$n"
say user "$(id -un)"

# What is here: a record "pod" for each directory, followed by its other facts.
# One that was sealed before anything of it arrived has a lock and no meta.
for f in */; do
	d=${f%/}
	case $d in '*' | *.new-* | *.gone) continue ;; esac
	[ -e "$d/meta" ] || [ -e "$d/lock" ] || continue
	line=
	{ IFS= read -r line <"$d/meta"; } 2>/dev/null
	say "pod.$d" "$line"
	if [ -s "$d/job" ] && read -r line <"$d/job"; then say job "$line"; fi
	line=$(readlink "$d/claim" 2>/dev/null) && say claim "$line"
	newest=
	for j in "$d"/journal.*; do
		r=${j##*.}
		case $r in *[!0-9]* | '') continue ;; esac
		if [ -z "$newest" ] || [ "$r" -gt "$newest" ]; then newest=$r; fi
	done
	if [ -n "$newest" ]; then
		read -r text <"$d/journal.$newest" # so that no remembered size is in the way
		text=$(cat "$d/journal.$newest"; echo .)
		say "journal.$newest" "${text%.}"
	fi
done
# Pods that arrived by half, with their secrets, and those that were sealed. An
# exchange of an earlier epoch may be about to move one into place: the rename
# decides who has it, whole.
for d in *.new-*; do
	[ -d "$d" ] && mv -T "$d" "$d.gone"
done
for f in */sealed; do
	[ -e "${f%/sealed}/meta" ] || [ ! -e "$f" ] || rm -rf "${f%/sealed}"
done
rm -rf ./*.gone submit.down-* submit.tar-*
exit 0
