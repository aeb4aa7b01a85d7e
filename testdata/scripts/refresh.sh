#!/bin/sh
# sh run/refresh.7/do SCRATCH HOLDER
#
# Written by knoc: gives the running pod's volumes what their objects have now.
# Beside this file is a directory for each volume with the new version of all its
# files. As under a kubelet one rename shows all of them at once: a volume's names
# are links through ..data. Containers cannot write here; still nothing that is a
# link is followed. Runs in the pod's directory.

umask 077
new=run/refresh.7

# turn VOLUMES NAME VERSION: VOLUMES are the directory's, and those on the scratch
turn() {
	at=$1/$2
	if [ -L "$1" ] || [ -L "$at" ] || [ ! -d "$at" ]; then return 0; fi
	[ "$(readlink "$at/..data")" != "$3" ] || return 0
	rm -rf "${at:?}/$3" "$at/..data_tmp"
	cp -RPp "$new/$2/$3" "$at/$3" || return
	# shellcheck disable=SC2016
	[ "$1" = vol ] || ${holder:+nsenter -U -t "$holder" --} sh -c '
		cd "$1" && find . -type d -exec chmod 755 {} +
		chgrp -R -h 1234 . && chmod -R g+rX . && find . -type d -exec chmod g+s {} +
	' sh "$at/$3" 2>/dev/null
	ln -s "$3" "$at/..data_tmp" || return
	mv -fT "$at/..data_tmp" "$at/..data" 2>/dev/null || ln -sfn "$3" "$at/..data" || return
	rm -f "$at/..data_tmp"
	for file in "$at/$3"/* "$at/$3"/.[!.]*; do
		name=${file##*/}
		if ! [ -e "$file" ] || [ -e "$at/$name" ] || [ -L "$at/$name" ]; then continue; fi
		ln -s "..data/$name" "$at/$name"
	done
	for file in "$at"/* "$at"/.[!.]*; do # names of files that are no more
		if ! [ -L "$file" ] || [ -e "$at/$3/${file##*/}" ]; then continue; fi
		rm -f "$file"
	done
	[ -z "$4" ] || return 0
	for file in "$at"/..?*; do
		if [ -L "$file" ] || [ "$file" = "$at/$3" ]; then continue; fi
		rm -rf "$file"
	done
}

holder=$2

turn vol 'v' '..0123456789abcdef' '' || exit
[ -z "$1" ] || turn "$1/.vol" 'v' '..0123456789abcdef' '' || exit
turn vol 'it'\''s "$(id)" \' 'it'\''s "$(id)" \' '1' || exit
[ -z "$1" ] || turn "$1/.vol" 'it'\''s "$(id)" \' 'it'\''s "$(id)" \' '1' || exit
rm -rf "$new"
