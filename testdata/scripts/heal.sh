# The directory of node knoc was taken away while its knoc runs. It is made
# again only where the one around it is still there: if that is gone too, a file
# system may be missing, and what is made now would be hidden when it is back.
cd -- '/home/u/my dir' || exit 73
umask 077
if [ -d 'knoc-c1' ]; then
	echo "$PWD/knoc-c1 is there and cannot be used" >&2
	exit 73
fi
# As a whole, for other exchanges of this knoc look for their epoch in it. The
# time is higher than any epoch that was counted, so that of two knocs that do
# this one is fenced.
new='knoc-c1'.new-$$ n=$(date +%s)
if mkdir -p "$new/changed" "$new/epoch/$n" && echo 'knoc' >"$new/node" && mv -T "$new" 'knoc-c1'; then
	say epoch "$n"
	exit 0
fi
rm -rf "$new"
exit 73
