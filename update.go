package knoc

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"path"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
)

// What reaches a pod that is on the cluster already: a new image of a container,
// and ephemeral containers (kubectl debug). The API lets nothing else of a pod
// change that a job could still follow.
//
// The file meta of the pod's directory says which images and which ephemeral
// containers were sent; the loop compares it with the API's pod (behind), makes
// the files of what is missing (startPrepare), and has them put there with a
// command each, in one exchange with all other commands (startStop). meta is
// replaced last: a knoc that starts again knows from it what is left to do, and
// whatever was cut is sent once more, which pod.sh does not mind.

// part is one container's change.
type part struct {
	c         *v1.Container
	ephemeral *v1.EphemeralContainer // nil: a new image of c
}

// held is a part that cannot be sent.
type held struct {
	notYet
	image string
	until time.Time
}

// change is what one pod's directory is to get.
type change struct {
	key      string // of the parts in it and those that were held back
	UID      string
	JobID    string
	Runs     bool
	Files    []file
	Commands []command
	Meta     podMeta
	refresh  *refresh // what the change brings, if it is one of volumes
}

// forGood is the time until which a refused part is held back.
var forGood = time.Unix(math.MaxInt32, 0)

// behind are the parts of the API's pod that were not sent yet.
func (m *podMeta) behind(pod *v1.Pod) []part {
	var parts []part
	for _, c := range allContainers(pod) {
		// A directory of an earlier version of knoc does not say which images it has.
		if had := m.Images[c.Name]; len(had) > 0 && had[len(had)-1] != c.Image {
			parts = append(parts, part{c: c})
		}
	}
	for i := range pod.Spec.EphemeralContainers {
		e := &pod.Spec.EphemeralContainers[i]
		if !slices.Contains(m.Ephemeral, e.Name) {
			parts = append(parts, part{asContainer(e), e})
		}
	}
	return parts
}

// asContainer is an ephemeral container as the container that it is.
func asContainer(e *v1.EphemeralContainer) *v1.Container {
	c := v1.Container(e.EphemeralContainerCommon)
	never := v1.ContainerRestartPolicyNever
	c.RestartPolicy = &never
	return &c
}

// asSent is a pod as it is, or is going to be, on the cluster when pod.sh is
// written: with the images of meta and without ephemeral containers.
func asSent(pod *v1.Pod, m *podMeta) *v1.Pod {
	pod = pod.DeepCopy()
	pod.Spec.EphemeralContainers = nil
	for _, c := range allContainers(pod) {
		if had := m.Images[c.Name]; len(had) > 0 {
			c.Image = had[0]
		}
	}
	return pod
}

// withEphemeral is a pod with the ephemeral containers of these names as further
// containers: so they have numbers, and are scripts like all others.
func withEphemeral(pod *v1.Pod, names []string) *v1.Pod {
	pod = pod.DeepCopy()
	for _, name := range names {
		for i := range pod.Spec.EphemeralContainers {
			if e := &pod.Spec.EphemeralContainers[i]; e.Name == name {
				pod.Spec.Containers = append(pod.Spec.Containers, *asContainer(e))
			}
		}
	}
	pod.Spec.EphemeralContainers = nil
	return pod
}

// with is meta with one more part.
func (m podMeta) with(p part) podMeta {
	if p.ephemeral != nil {
		m.Ephemeral = append(slices.Clone(m.Ephemeral), p.c.Name)
		return m
	}
	images := map[string][]string{}
	for name, had := range m.Images {
		images[name] = had
	}
	images[p.c.Name] = append(slices.Clone(images[p.c.Name]), p.c.Image)
	m.Images = images
	return m
}

// changeWork decides what is to be sent of what the pod's object has and its
// directory has not. A pod that ends gets nothing any more, as under a kubelet.
func (l *loop) changeWork(w *work, now time.Time, todo *plan) {
	if !w.followed() {
		return
	}
	var parts []part
	var key strings.Builder
	for _, p := range w.meta.behind(w.pod) {
		if h, ok := w.held[p.c.Name]; ok && h.image == p.c.Image && now.Before(h.until) {
			l.at(h.until)
			continue
		}
		parts = append(parts, p)
		fmt.Fprintf(&key, "%s %s\n", p.c.Name, p.c.Image)
	}
	switch {
	case len(parts) == 0 && w.refresh == nil:
		w.change = nil
	case now.Before(w.changeAt):
		l.at(w.changeAt)
	case len(parts) == 0:
		var err error
		if w.change, err = w.refreshChange(); err != nil {
			return // it is all text
		}
		w.change.JobID, w.change.Runs = w.jobID, w.jobRuns()
		todo.changes = append(todo.changes, w)
	case w.change != nil && w.change.refresh == nil && w.change.key == key.String():
		w.change.JobID, w.change.Runs = w.jobID, w.jobRuns()
		todo.changes = append(todo.changes, w)
	default:
		w.change = nil
		todo.prepare = append(todo.prepare, preparing{w: w, pod: w.pod, meta: w.meta, key: key.String(), parts: parts})
	}
}

// preparing is a pod whose change is being made.
type preparing struct {
	w     *work
	pod   *v1.Pod
	meta  podMeta
	key   string
	parts []part

	change  change
	held    map[string]held
	refused map[string]bool
	ignored []string
}

// startPrepare makes the files of changes; the API server may be asked for what
// environments name.
func (l *loop) startPrepare(list []preparing) {
	if len(list) == 0 || l.preparing {
		return
	}
	l.preparing = true
	go func() {
		ctx, cancel := context.WithTimeout(l.ctx, time.Minute)
		defer cancel()
		for i := range list {
			l.prepare(ctx, &list[i])
		}
		l.post(l.ctx, func() {
			l.preparing = false
			for i := range list {
				l.prepared(&list[i])
			}
		})
	}()
}

// prepared takes in a change that can be sent now, and what cannot be.
func (l *loop) prepared(p *preparing) {
	w, now := p.w, l.now()
	for name, h := range p.held {
		old, again := w.held[name]
		if h.until = now.Add(4 * time.Second); p.refused[name] { // else healed within seconds
			h.until = forGood
		}
		if !again || old.image != h.image || old.Message != h.Message {
			reason := h.Reason
			if !p.refused[name] {
				reason = "Failed" // a kubelet's event has the container's waiting reason in no case
			}
			l.event(w, v1.EventTypeWarning, reason, h.Message)
		}
		if w.held == nil {
			w.held = map[string]held{}
		}
		w.held[name], w.dirty = h, true
	}
	if len(p.change.Commands) == 0 {
		return
	}
	for _, text := range p.ignored {
		l.event(w, v1.EventTypeWarning, "FieldIgnored", text)
	}
	if len(p.held) > 0 {
		// What is held back comes when its time has come, or not at all.
		var key strings.Builder
		for _, part := range p.parts {
			if _, ok := p.held[part.c.Name]; !ok {
				fmt.Fprintf(&key, "%s %s\n", part.c.Name, part.c.Image)
			}
		}
		p.key = key.String()
	}
	p.change.key = p.key
	w.change = &p.change
}

// prepare makes one pod's change.
func (p *KNOCProvider) prepare(ctx context.Context, x *preparing) {
	x.held, x.refused = map[string]held{}, map[string]bool{}
	meta := x.meta
	for _, part := range x.parts {
		next := meta.with(part)
		files, cmd, ignored, err := p.stagePart(ctx, x.pod, part, &next)
		var never *refusal
		var notNow *notYet
		h := held{image: part.c.Image}
		switch {
		case err == nil:
			meta = next
			x.change.Files = append(x.change.Files, files...)
			x.change.Commands = append(x.change.Commands, cmd)
			x.ignored = append(x.ignored, ignored...)
			continue
		case errors.As(err, &never):
			h.notYet, x.refused[part.c.Name] = notYet(*never), true
		case errors.As(err, &notNow):
			h.notYet, x.refused[part.c.Name] = *notNow, notNow.Reason == invalidImageName
		default:
			h.notYet = notYet{"StagingFailed", err.Error()}
		}
		x.held[part.c.Name] = h
	}
	if len(x.change.Commands) == 0 {
		return
	}
	data, err := json.Marshal(meta)
	if err != nil {
		return // it is all text
	}
	x.change.UID, x.change.Meta = string(x.pod.UID), meta
	x.change.Files = append(x.change.Files, file{Name: "meta", Mode: 0o600, Body: append(data, '\n')})
}

// stagePart makes the files of one part, and the command that tells pod.sh of
// them. meta has the part already. A new image comes with a new environment, as
// a container that a kubelet starts again has one.
func (p *KNOCProvider) stagePart(ctx context.Context, pod *v1.Pod, part part, meta *podMeta) ([]file, command, []string, error) {
	c := part.c
	all := allContainers(pod)
	number, verb, count := 0, "update", int64(len(meta.Images[c.Name])-1)
	var ignored []string
	if part.ephemeral != nil {
		verb, number = "add", len(all)+len(meta.Ephemeral)
		count = int64(number)
		var err error
		if ignored, err = checkEphemeral(pod, part.ephemeral); err != nil {
			return nil, command{}, nil, err
		}
	} else {
		number = 1 + slices.IndexFunc(all, func(x *v1.Container) bool { return x.Name == c.Name })
	}
	facts := p.nodeFacts()
	services, sentence, err := p.podServices(ctx, pod)
	if err != nil {
		return nil, command{}, nil, err
	}
	if facts.Services = services; sentence != "" {
		ignored = append(ignored, sentence)
	}
	objs := readOnce(p.objs)
	vars, err := stageEnv(ctx, pod, c, objs, facts)
	if err != nil {
		return nil, command{}, nil, err
	}
	env, err := envFile(vars, p.cfg.Runtime, isMapped(pod))
	if err != nil {
		return nil, command{}, nil, err
	}
	cfg := p.scriptConfig(path.Join(p.remote.dir, string(pod.UID)), nil)
	if cfg.Hosted, err = hostVolumes(ctx, pod, p.objs, p.cfg); err != nil {
		return nil, command{}, nil, err
	}
	if cfg.Credentials, _, err = pullSecrets(ctx, pod, objs); err != nil {
		return nil, command{}, nil, err
	}
	script, err := newPodScript(withEphemeral(pod, meta.Ephemeral), cfg)
	if err != nil {
		return nil, command{}, nil, err
	}
	text, err := script.part(number)
	if err != nil {
		return nil, command{}, nil, err
	}
	name := "run/" + verb + "." + c.Name + "." + strconv.FormatInt(count, 10)
	files, err := envHelpers(env)
	if err != nil {
		return nil, command{}, nil, err
	}
	files = append(files,
		file{Name: "env/" + c.Name, Mode: 0o600, Body: env},
		file{Name: name, Mode: 0o600, Body: []byte(text)})
	files = append(files, pullFiles(pod, []*v1.Container{c}, cfg)...)
	if script.Mapped { // run/enter.sh knows each container's user
		enter, err := render("enter.sh.tmpl", script)
		if err != nil {
			return nil, command{}, nil, err
		}
		files = append(files, file{Name: "run/enter.sh", Mode: 0o700, Body: []byte(enter)})
	}
	return files, command{UID: string(pod.UID), Verb: verb, Container: c.Name, Number: count}, ignored, nil
}

// changesSent takes in which changes are on the cluster now.
func (l *loop) changesSent(works []*work, sent []change, done map[types.UID]bool, now time.Time) {
	for i, w := range works {
		if !done[w.meta.UID] {
			w.changeAt = now.Add(5 * time.Second) // cut, or its directory is not writable
			continue
		}
		w.meta, w.change, w.dirty = sent[i].Meta, nil, true
		w.fed = w.fed || sent[i].refresh == nil
		if sent[i].refresh == w.refresh {
			w.refresh = nil
		}
		for _, c := range sent[i].Commands {
			delete(w.held, c.Container)
			l.log.Info("sent to the job", "pod", w.meta.Namespace+"/"+w.meta.Name, "command", c.Verb, "container", c.Container, "number", c.Number, "job", w.jobID)
		}
	}
}

// changesTar is the stream with the files of changes.
func changesTar(changes []change, suffix string) (*bytes.Buffer, error) {
	var pods []submission
	for _, c := range changes {
		pods = append(pods, submission{UID: types.UID(c.UID), Files: c.Files})
	}
	var stream bytes.Buffer
	return &stream, writeTar(&stream, pods, suffix)
}

// checkEphemeral is checkPod for an ephemeral container of the pod.
func checkEphemeral(pod *v1.Pod, e *v1.EphemeralContainer) (sentences []string, err error) {
	k := checker{}
	at := "spec.ephemeralContainers[" + e.Name + "]"
	if problems := validation.IsDNS1123Label(e.Name); len(problems) > 0 || hasContainer(asSent(pod, &podMeta{}), e.Name) {
		return nil, refuse("InvalidPod", "the name of an ephemeral container: %q: must be a name of its own of letters, digits and dashes", e.Name)
	}
	if e.Image == "" {
		return nil, refuse("InvalidPod", "%s has no image", at)
	}
	// kubectl debug asks for this capability by itself.
	if s := e.SecurityContext; s != nil && s.Capabilities != nil && slices.Contains(s.Capabilities.Add, ptrace) {
		k.ignored = append(k.ignored, at+".securityContext.capabilities.add: SYS_PTRACE is ignored: nobody needs it for the processes of the same user")
		e = e.DeepCopy()
		s = e.SecurityContext
		s.Capabilities.Add = slices.DeleteFunc(s.Capabilities.Add, func(c v1.Capability) bool { return c == ptrace })
		if reflect.ValueOf(*s.Capabilities).IsZero() || len(s.Capabilities.Add)+len(s.Capabilities.Drop) == 0 {
			s.Capabilities = nil
		}
	}
	if isTrue(pod.Spec.ShareProcessNamespace) { // the target's processes are there
		e = e.DeepCopy()
		e.TargetContainerName = ""
	}
	k.fields(at, reflect.ValueOf(e).Elem())
	k.texts(at, reflect.ValueOf(*e))
	k.container(pod, asContainer(e))
	full := pod.DeepCopy()
	full.Spec.EphemeralContainers = []v1.EphemeralContainer{*e}
	full = withEphemeral(full, []string{e.Name})
	if k.users(full); isMapped(full) && !isMapped(asSent(pod, &podMeta{})) {
		k.refuse("UnsupportedField", "%s.securityContext names a user or group id, and the pod has no ids of its own: leave it out", at)
	}
	if len(k.refused) > 0 {
		return k.ignored, refuse(k.reason, "%s", strings.Join(k.refused, "; "))
	}
	return k.ignored, nil
}

// ptrace is the capability that kubectl debug's own profile asks for.
const ptrace v1.Capability = "SYS_PTRACE"
