package knoc

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"path"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Exit statuses of knoc's own scripts, from sysexits.h where one fits.
const (
	exitUnavailable = 69 // EX_UNAVAILABLE: a command is missing
	exitCantCreate  = 73 // EX_CANTCREAT: the remote directory cannot be used
	exitFenced      = 75 // EX_TEMPFAIL: another knoc has a higher epoch
	exitForeign     = 78 // EX_CONFIG: the directory belongs to another cluster
)

const (
	submitParallel = 4                // sbatch at a time; slurmctld is fastest with a few
	sbatchLimit    = 60 * time.Second // sbatch itself gives up after about 10 s without slurmctld
	lockLimit      = 2 * sbatchLimit  // a call of sbatch this old is over
	slurmLimit     = 60 * time.Second // any other Slurm command
)

// remote is one node's directory on the cluster and the exchanges that read and
// change it. It keeps no state but what start told it; all of it may be called
// from any goroutine after start.
type remote struct {
	ssh  *sshClient
	node string // Kubernetes node name
	base string // directory name: <node>-<cluster id>
	root string // --remote-dir
	log  *slog.Logger
	dir  string // absolute path of base, told by start
	user string // who we are on the login node

	mu    sync.Mutex
	epoch string // told by start, and by heal
}

func (r *remote) currentEpoch() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.epoch
}

func (r *remote) setEpoch(epoch string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.epoch = epoch
}

// podMeta is the file meta of a pod's directory: what a knoc that starts must
// know of a pod that the API server may no longer have. It holds no secrets.
type podMeta struct {
	Namespace      string    `json:"namespace"`
	Name           string    `json:"name"`
	UID            types.UID `json:"uid"`
	InitContainers []string  `json:"init,omitempty"`
	Containers     []string  `json:"containers"`
	// Grace is terminationGracePeriodSeconds, used when the object is gone.
	Grace int64 `json:"grace"`
	// Images are the images that each container was given, by its name: first
	// that of pod.sh, then those that came later (update.go).
	Images map[string][]string `json:"images,omitempty"`
	// Ephemeral are the ephemeral containers that were sent, in the order of
	// their numbers.
	Ephemeral []string `json:"ephemeral,omitempty"`
	// Deadline is activeDeadlineSeconds as the script has it; 0: none.
	Deadline int64 `json:"deadline,omitempty"`
	// Sent are the volumes that follow objects, as they were sent last.
	Sent map[string]sentVolume `json:"sent,omitempty"`
}

func metaOf(pod *v1.Pod) podMeta {
	m := podMeta{Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID, Grace: gracePeriod(pod)}
	if d := pod.Spec.ActiveDeadlineSeconds; d != nil {
		m.Deadline = *d
	}
	for _, c := range pod.Spec.InitContainers {
		m.InitContainers = append(m.InitContainers, c.Name)
	}
	for _, c := range pod.Spec.Containers {
		m.Containers = append(m.Containers, c.Name)
	}
	m.Images = map[string][]string{}
	for _, c := range allContainers(pod) {
		m.Images[c.Name] = []string{c.Image}
	}
	return m
}

// found is one pod's directory as start finds it.
type found struct {
	Meta    podMeta
	JobID   string // "" when no submission is known to have been accepted
	Restart int
	Journal []byte // of the newest restart count
}

// remoteDirPattern is what the absolute path of the remote directory may hold:
// it stands in #SBATCH lines, in --mount options and in file name patterns of
// Slurm, each with special characters of its own.
var remoteDirPattern = regexp.MustCompile(`^[A-Za-z0-9._/@+-]+$`)

// start takes the next epoch and returns what is already there. An error that
// is not errConnection is final: trying again would not mend it.
func (r *remote) start(ctx context.Context) ([]found, error) {
	script, err := render("start.sh.tmpl", map[string]any{"Node": r.node, "Root": r.root, "Base": r.base})
	if err != nil {
		return nil, err
	}
	var all []found
	err = r.ssh.Exchange(ctx, script, nil, func(name string, body []byte) error {
		last := len(all) - 1
		kind, rest, _ := strings.Cut(name, ".")
		switch kind {
		case "dir":
			r.dir = string(body)
		case "epoch":
			r.setEpoch(string(body))
		case "user":
			r.user = string(body)
		case "pod":
			all = append(all, found{Meta: r.readMeta(types.UID(rest), body)})
		case "job":
			// What is no id leaves the pod in doubt: it is looked for by name.
			if all[last].JobID, err = parseJobID(body); err != nil {
				r.log.Warn("a pod's file job has no job id", "uid", all[last].Meta.UID, "err", err)
			}
		case "claim":
			if all[last].JobID == "" {
				all[last].JobID = string(body)
			}
		case "journal":
			all[last].Restart, _ = strconv.Atoi(rest)
			all[last].Journal = bytes.Clone(body)
		}
		return nil
	})
	if exit := (*exitError)(nil); errors.As(err, &exit) {
		switch exit.Status {
		case exitUnavailable, exitCantCreate, exitForeign:
			return nil, fmt.Errorf("remote directory %s on the login node: %s", r.root, strings.TrimSpace(exit.Stderr))
		}
	}
	if err != nil {
		return nil, err
	}
	if !remoteDirPattern.MatchString(r.dir) {
		return nil, fmt.Errorf("remote directory %q: only letters, digits and ._/@+- may be in its path; set --remote-dir to another one", r.dir)
	}
	kept := all[:0]
	for _, f := range all {
		if f.Meta.UID != "" {
			kept = append(kept, f)
		}
	}
	return kept, nil
}

// readMeta reads the file meta of a pod's directory. Where it is broken the
// directory's name still tells the UID, so that no job is forgotten; a directory
// under another name than its pod's is none of knoc's and has no UID.
func (r *remote) readMeta(dir types.UID, body []byte) podMeta {
	var m podMeta
	if err := json.Unmarshal(body, &m); err != nil || m.UID == "" {
		r.log.Warn("a pod's file meta cannot be read", "directory", dir, "err", err)
		m = podMeta{UID: dir, Grace: v1.DefaultTerminationGracePeriodSeconds}
	}
	if m.UID != dir || !validUID(dir) {
		r.log.Warn("ignoring a directory that is not its pod's", "directory", dir, "uid", m.UID)
		return podMeta{}
	}
	return m
}

// validUID says whether a pod UID can be the name of a directory and of a job.
// The API server's are UUIDs; static pods' are hashes.
func validUID(uid types.UID) bool {
	return uidPattern.MatchString(string(uid))
}

var uidPattern = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9-]{0,62}$`)

// What submit is to do about one pod; see submit.sh.
const (
	actionSubmit = "submit" // call sbatch, if it was not called before
	actionRetry  = "retry"  // call it again: Slurm was asked and has no such job
	actionSeal   = "seal"   // make sure that it is never called
	actionDrop   = "drop"   // that it is never called again: Slurm was asked and has no such job
)

// submission is one pod for submit. Files are those of its directory but ready;
// nil when the directory is on the cluster already.
type submission struct {
	UID    types.UID
	Files  []file
	Action string
}

// outcome is what submit found of one pod.
type outcome int

const (
	unstaged  outcome = iota // its directory is not on the cluster
	staged                   // it is, and sbatch was not called
	sealed                   // sbatch was not called and never will be
	inDoubt                  // sbatch was called and told no job id: Slurm may have it all the same
	submitted                // sbatch told the job id
)

// reply is an outcome with its job id, or what sbatch or tar said.
type reply struct {
	outcome
	Text string
}

// submit stages pods and submits each once, or seals it. When the error is not
// nil, nothing is known of any pod that the answers do not have; to call submit
// again for it is safe.
func (r *remote) submit(ctx context.Context, pods []submission) (map[types.UID]reply, error) {
	// Each exchange unpacks beside the others: one that was cut may still be at it.
	suffix := ".new-" + rand.Text()
	var stream bytes.Buffer
	if err := writeTar(&stream, pods, suffix); err != nil {
		return nil, err
	}
	type pod struct{ UID, Action string }
	var list []pod
	for _, p := range pods {
		list = append(list, pod{string(p.UID), p.Action})
	}
	answers := map[types.UID]reply{}
	err := r.change(ctx, "submit.sh.tmpl", map[string]any{
		"Pods": list, "Suffix": suffix, "Parallel": submitParallel,
		"SbatchSeconds": int(sbatchLimit.Seconds()), "LockSeconds": int(lockLimit.Seconds()),
	}, &stream, func(name string, body []byte) error {
		kind, uid, _ := strings.Cut(name, ".")
		a := reply{Text: strings.ToValidUTF8(strings.TrimSpace(string(body)), "?")}
		switch kind {
		case "job":
			id, err := parseJobID(body)
			if a.outcome = submitted; err != nil {
				a.outcome, id = inDoubt, err.Error()
			}
			a.Text = id
		case "error":
			a.outcome = inDoubt
		case "sealed":
			a.outcome = sealed
		case "staged":
			a.outcome = staged
		case "unstaged":
			a.outcome = unstaged
		default:
			return nil
		}
		answers[types.UID(uid)] = a
		return nil
	})
	return answers, err
}

// writeTar writes one directory per pod, its member ready last: what the
// remote side takes as the sign of a whole pod.
func writeTar(w io.Writer, pods []submission, suffix string) error {
	t := tar.NewWriter(w)
	for _, p := range pods {
		if p.Files == nil {
			continue
		}
		root := string(p.UID) + suffix + "/"
		if err := t.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: root, Mode: 0o700}); err != nil {
			return err
		}
		for _, f := range append(p.Files, file{Name: "ready", Mode: 0o600}) {
			h := &tar.Header{Name: root + f.Name, Mode: int64(f.Mode.Perm()), Typeflag: tar.TypeReg, Size: int64(len(f.Body))}
			switch {
			case f.Link != "":
				h.Typeflag, h.Linkname, h.Size = tar.TypeSymlink, f.Link, 0
			case f.Mode&fs.ModeDir != 0:
				h.Typeflag, h.Name, h.Size = tar.TypeDir, h.Name+"/", 0
			}
			if err := t.WriteHeader(h); err != nil {
				return fmt.Errorf("staging %s of pod %s: %w", f.Name, p.UID, err)
			}
			if h.Size > 0 {
				if _, err := t.Write(f.Body); err != nil {
					return err
				}
			}
		}
	}
	return t.Close()
}

// command is one line for a running job; see pod.sh.
type command struct {
	UID       string
	JobID     string
	Verb      string // stop, deadline, update, add, refresh
	Container string // "-" for the pod
	Number    int64
	Runs      bool // the job has started: it is woken by a signal
}

// stop writes commands, cancels the jobs in cancel, and of those in pending the
// ones that Slurm has not started by then, parks jobs and lets them go. A job that is gone is no error. Of the
// changes it tells which are there with all their files, whatever the error.
func (r *remote) stop(ctx context.Context, todo plan, changes []change) (map[types.UID]bool, error) {
	suffix := ".new-" + rand.Text()
	var stream io.Reader
	if len(changes) > 0 {
		tar, err := changesTar(changes, suffix)
		if err != nil {
			return nil, err
		}
		stream = tar
	}
	done := map[types.UID]bool{}
	return done, r.change(ctx, "stop.sh.tmpl", map[string]any{
		"Commands": todo.commands, "Cancel": todo.cancel, "Pending": todo.pending, "Changes": changes, "Suffix": suffix,
		"Park": todo.parkJobs, "Release": todo.releaseJobs,
	}, stream, func(name string, _ []byte) error {
		if uid, ok := strings.CutPrefix(name, "changed."); ok {
			done[types.UID(uid)] = true
		}
		return nil
	})
}

// remove deletes the directories of pods whose jobs are over and returns those
// that are gone.
func (r *remote) remove(ctx context.Context, uids []types.UID) ([]types.UID, error) {
	var gone []types.UID
	names := make([]string, len(uids))
	for i, uid := range uids {
		names[i] = string(uid)
	}
	err := r.change(ctx, "remove.sh.tmpl", map[string]any{"UIDs": names}, nil, func(name string, _ []byte) error {
		if uid, ok := strings.CutPrefix(name, "removed."); ok {
			gone = append(gone, types.UID(uid))
		}
		return nil
	})
	return gone, err
}

// adopt writes down job ids that were found by name.
func (r *remote) adopt(ctx context.Context, ids map[types.UID]string) error {
	type pair struct{ UID, JobID string }
	var jobs []pair
	for uid, id := range ids {
		jobs = append(jobs, pair{string(uid), id})
	}
	return r.change(ctx, "adopt.sh.tmpl", map[string]any{"Jobs": jobs}, nil, nil)
}

// change runs a fenced script: data gets the fence's fields added.
func (r *remote) change(ctx context.Context, template string, data map[string]any, in io.Reader, each func(string, []byte) error) error {
	epoch := r.currentEpoch()
	data["Dir"], data["Epoch"] = r.dir, epoch
	script, err := render(template, data)
	if err != nil {
		return err
	}
	if each == nil {
		each = func(string, []byte) error { return nil }
	}
	return r.fenced(r.ssh.Exchange(ctx, script, in, each), epoch)
}

// fenced turns the exit status of the fence into errFenced. An exchange of
// before the directory was made again is only to be sent again.
func (r *remote) fenced(err error, epoch string) error {
	if exit := (*exitError)(nil); errors.As(err, &exit) && exit.Status == exitFenced {
		if r.currentEpoch() != epoch {
			return fmt.Errorf("%w: the node's directory was made again in the meantime", errConnection)
		}
		return errFenced
	}
	return err
}

// heal makes the node's directory again when it was taken away, with an epoch
// of its own.
func (r *remote) heal(ctx context.Context) error {
	script, err := render("heal.sh.tmpl", map[string]any{"Node": r.node, "Root": path.Dir(r.dir), "Base": r.base})
	if err != nil {
		return err
	}
	return r.ssh.Exchange(ctx, script, nil, func(name string, body []byte) error {
		if name == "epoch" {
			r.setEpoch(string(body))
		}
		return nil
	})
}

// slurmError is a Slurm command that ended with an error: Slurm was reached
// over SSH but did not answer as it should.
type slurmError struct {
	Command string
	Status  int
	Text    string // its stderr
}

func (e *slurmError) Error() string {
	return fmt.Sprintf("%s on the login node ended with %d: %s", e.Command, e.Status, e.Text)
}

// slurm runs one Slurm command that changes nothing and returns its output.
func (r *remote) slurm(ctx context.Context, words ...string) ([]byte, error) {
	return r.slurmAnd(ctx, "", nil, words...)
}

// slurmAnd also lists the images of a cache, each as pull.sh describes it.
func (r *remote) slurmAnd(ctx context.Context, cache string, image func(text string), words ...string) ([]byte, error) {
	script, err := render("slurm.sh.tmpl", map[string]any{"Words": words, "Seconds": int(slurmLimit.Seconds()), "Fenced": false, "Images": cache})
	if err != nil {
		return nil, err
	}
	var out []byte
	err = r.ssh.Exchange(ctx, script, nil, func(name string, body []byte) error {
		switch name {
		case "out":
			out = bytes.Clone(body)
		case "image":
			image(string(body))
		}
		return nil
	})
	if exit := (*exitError)(nil); errors.As(err, &exit) {
		text := strings.ToValidUTF8(strings.TrimSpace(exit.Stderr), "?")
		if exit.Status == 124 || exit.Status == 137 {
			text = strings.TrimSpace(fmt.Sprintf("no answer in %v %s", slurmLimit, text))
		}
		out, err = nil, &slurmError{words[0], exit.Status, text}
	}
	r.ssh.metrics.command(words[0], err)
	return out, err
}

// squeue asks for all of the user's jobs that slurmctld remembers, the ended
// ones of the last MinJobAge too.
func (r *remote) squeue(ctx context.Context) ([]job, error) {
	out, err := r.slurm(ctx, "squeue", "--noheader", "--states=all", "--user="+r.user, "--format="+squeueFormat)
	if err != nil {
		return nil, err
	}
	return parseSqueue(out)
}

// sacct asks the accounting database for jobs by id, and by name where no id is
// known: a question by name is one for a window of time, in which jobs that were
// never eligible (held ones) do not show. The error is errNoAccounting where the
// site keeps none.
func (r *remote) sacct(ctx context.Context, ids []string, uids []types.UID) ([]job, error) {
	const since = 30 * 24 * 3600
	names := make([]string, len(uids))
	for i, uid := range uids {
		names[i] = jobName(uid)
	}
	var jobs []job
	for _, q := range []struct {
		wanted bool
		words  []string
	}{
		{len(ids) > 0, []string{"--jobs=" + strings.Join(ids, ",")}},
		{len(names) > 0, []string{"--user=" + r.user, fmt.Sprintf("--starttime=now-%dseconds", since), "--name=" + strings.Join(names, ",")}},
	} {
		if !q.wanted {
			continue
		}
		out, err := r.slurm(ctx, append([]string{"sacct", "--allocations", "--parsable2", "--noheader", "--duplicates", "--format=" + sacctFormat}, q.words...)...)
		if e := (*slurmError)(nil); errors.As(err, &e) {
			if _, none := parseSacct([]byte(e.Text)); errors.Is(none, errNoAccounting) {
				return nil, errNoAccounting
			}
		}
		if err != nil {
			return nil, err
		}
		some, err := parseSacct(out)
		if err != nil {
			return nil, err
		}
		jobs = append(jobs, some...)
	}
	return jobs, nil
}

// sinfo asks for the partition's nodes, and in the same go for the images here.
func (r *remote) sinfo(ctx context.Context, partition string) (nodeResources, []v1.ContainerImage, error) {
	words := []string{"sinfo", "--noheader", "--Node", "--format=" + sinfoFormat}
	if partition != "" {
		words = append(words, "--partition="+partition)
	}
	var images []string
	out, err := r.slurmAnd(ctx, path.Dir(r.dir)+"/images", func(text string) { images = append(images, text) }, words...)
	if err != nil {
		return nodeResources{}, nil, err
	}
	resources, err := parseSinfo(out)
	return resources, nodeImages(images), err
}

// knows asks slurmctld for a pod's job, which it may know longer than squeue
// shows it. Another job with that id is not the pod's: a slurmctld that lost its
// state counts from the beginning again.
func (r *remote) knows(ctx context.Context, uid types.UID, jobID string) (bool, error) {
	out, err := r.slurm(ctx, "scontrol", "--oneliner", "show", "job", jobID)
	if e := (*slurmError)(nil); errors.As(err, &e) && strings.Contains(e.Text, "Invalid job id") {
		return false, nil
	}
	return err == nil && strings.Contains(string(out), " JobName="+jobName(uid)+" "), err
}

// jobName is the Slurm job name of a pod: how a job is found again when sbatch
// could not tell its id.
func jobName(uid types.UID) string { return jobPrefix + string(uid) }
