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
# Pods that are gone from Kubernetes and whose jobs are over.
for uid in 'u-1' 'it'\''s "$(id)" \' ; do
	rm -rf "$uid.new-"* "changed/$uid."*
	rm -rf "$uid" && say "removed.$uid" ''
done
exit 0
