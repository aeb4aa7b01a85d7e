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
# Pods that are gone from Kubernetes and whose jobs are over.
for uid in 'u-1' 'it'\''s "$(id)" \' ; do
	rm -rf "$uid.new-"* "changed/$uid."*
	rm -rf "$uid" && say "removed.$uid" ''
done
exit 0
