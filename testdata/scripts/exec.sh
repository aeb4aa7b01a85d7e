# kubectl exec: one more step in the pod's job, which joins the container; and
# kubectl port-forward to a server that only the compute node itself can reach.
# The pod's containers run on the first node of the job, where its script does.
# That node's host name need not be its name in Slurm, so it is called by number.
# The outer sh tells the command's exit status by itself: srun would say it only
# together with an error line of its own. It has handlers for the keyboard's
# signals, so that Ctrl-C ends the command and not its messenger.
exec srun --jobid='12' --relative=0 --nodes=1 --ntasks=1 --overlap \
	--job-name='knoc-exec-1' --chdir=/ --mpi=none --quiet --input=none \
	sh -c 'trap : INT QUIT HUP; sh "$@"; printf "%s%s\n" "$0" "$?" >&2' '@MARK' \
	'/home/hpcuser/.knoc/knoc-c1/u-1/run/enter.sh' \
	'main' \
	'--' \
	'sh' \
	'-c' \
	'it'\''s "$(id)" \'
