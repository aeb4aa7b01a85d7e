package knoc

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"path"
	"slices"
	"strconv"
	"time"

	v1 "k8s.io/api/core/v1"
)

// Volumes that project objects follow them while the pod runs: once a minute each
// object is read, one GET however many pods have it, and what differs from what a
// pod's directory has (its meta says what that is) goes there as a change
// (update.go), with run/refresh.<number>/do, which pod.sh runs. A pod whose objects
// are as they were costs nothing on the cluster.

// refreshEvery is how often objects are read; a kubelet's sync is as often.
const refreshEvery = time.Minute

// sentVolume is what a pod's directory has of a volume.
type sentVolume struct {
	// Hash stands for all files but tokens, which are never twice the same.
	Hash string `json:"hash"`
	// Renew is when its tokens are to be renewed, in seconds; 0: it has none.
	Renew int64 `json:"renew,omitempty"`
}

// renewAt is when a kubelet renews a token: at 80 % of its life, after a day at
// the latest, and not all at the same moment (pkg/kubelet/token requiresRefresh).
func renewAt(now, expires time.Time, seconds int64) time.Time {
	at := expires.Add(-time.Duration(seconds) * time.Second / 5)
	if day := now.Add(24 * time.Hour); day.Before(at) {
		at = day
	}
	return at.Add(-rand.N(10 * time.Second))
}

// tokenTimes are objects that note when their tokens must be renewed.
type tokenTimes struct {
	objects
	renew time.Time // the first; zero: there was none
}

func (o *tokenTimes) Token(ctx context.Context, pod *v1.Pod, audience string, seconds int64) (string, time.Time, error) {
	token, renew, err := o.objects.Token(ctx, pod, audience, seconds)
	if err == nil && (o.renew.IsZero() || renew.Before(o.renew)) {
		o.renew = renew
	}
	return token, renew, err
}

func (o *tokenTimes) sent(p payload) sentVolume {
	s := sentVolume{Hash: p.contentHash()}
	if !o.renew.IsZero() {
		s.Renew = o.renew.Unix()
	}
	return s
}

// noTokens are objects that give no tokens: to see what else has changed.
type noTokens struct{ objects }

func (noTokens) Token(context.Context, *v1.Pod, string, int64) (string, time.Time, error) {
	return "", time.Time{}, nil
}

// steady are objects of which the immutable ones are read once.
type steady struct {
	objects
	kept, used map[string]any
}

func (o *steady) ConfigMap(ctx context.Context, namespace, name string) (*v1.ConfigMap, error) {
	return keep(o, "c/"+namespace+"/"+name, func() (*v1.ConfigMap, error) { return o.objects.ConfigMap(ctx, namespace, name) },
		func(c *v1.ConfigMap) bool { return isTrue(c.Immutable) })
}

func (o *steady) Secret(ctx context.Context, namespace, name string) (*v1.Secret, error) {
	return keep(o, "s/"+namespace+"/"+name, func() (*v1.Secret, error) { return o.objects.Secret(ctx, namespace, name) },
		func(s *v1.Secret) bool { return isTrue(s.Immutable) })
}

func keep[T any](o *steady, key string, read func() (T, error), immutable func(T) bool) (T, error) {
	if had, ok := o.kept[key].(T); ok {
		o.used[key] = had
		return had, nil
	}
	object, err := read()
	if err == nil && immutable(object) {
		o.used[key] = object
	}
	return object, err
}

// refresh is what a pod's directory is to get of its volumes.
type refresh struct {
	number int64
	files  []file
	sent   map[string]sentVolume
	// problem is why a volume stays as it is, as an event says it.
	problem string
}

// startRefresh reads the objects of all pods' volumes, once a minute.
func (l *loop) startRefresh(now time.Time) {
	if l.refreshAt.IsZero() {
		l.refreshAt = now.Add(refreshEvery / 6)
	}
	if l.refreshing || now.Before(l.refreshAt) {
		l.at(l.refreshAt)
		return
	}
	l.refreshAt = now.Add(refreshEvery - rand.N(refreshEvery/10))
	l.at(l.refreshAt)
	type task struct {
		w    *work
		pod  *v1.Pod
		sent map[string]sentVolume
		refresh
	}
	var list []task
	for _, w := range l.works {
		// What is on its way already is looked at again when it is there.
		if w.followed() && w.refresh == nil && slices.ContainsFunc(w.pod.Spec.Volumes, func(v v1.Volume) bool { return isProjection(&v) }) {
			list = append(list, task{w: w, pod: w.pod, sent: w.meta.Sent})
		}
	}
	if len(list) == 0 {
		l.steady = nil
		return
	}
	l.refreshing = true
	all := &steady{objects: l.objs, kept: l.steady, used: map[string]any{}}
	go func() {
		ctx, cancel := context.WithTimeout(l.ctx, 5*time.Minute)
		defer cancel()
		objs, facts := readOnce(all), l.nodeFacts()
		for i := range list {
			list[i].refresh = refreshOf(ctx, list[i].pod, list[i].sent, objs, facts, now)
		}
		l.post(l.ctx, func() {
			l.refreshing, l.steady = false, all.used
			for _, t := range list {
				if t.problem != "" && t.problem != t.w.refreshProblem {
					l.event(t.w, v1.EventTypeWarning, "FailedMount", t.problem)
				}
				if t.w.refreshProblem = t.problem; len(t.files) > 0 {
					t.w.refresh = &t.refresh
				}
			}
		})
	}()
}

// refreshOf makes the files of those volumes of a pod that are not as they were
// sent. An object that is gone, or cannot be read, leaves them as they are.
func refreshOf(ctx context.Context, pod *v1.Pod, sent map[string]sentVolume, objs objects, facts nodeFacts, now time.Time) refresh {
	r := refresh{number: now.Unix(), sent: map[string]sentVolume{}}
	dir := "run/refresh." + strconv.FormatInt(r.number, 10)
	data := refreshData{Number: r.number, scratchData: scratchOf(pod, scriptConfig{})}
	for i := range pod.Spec.Volumes {
		v := &pod.Spec.Volumes[i]
		if !isProjection(v) || ctx.Err() != nil {
			continue
		}
		plain, err := volumePayload(ctx, pod, v, noTokens{objs}, facts)
		had := sent[v.Name]
		if err == nil && had.Hash == plain.contentHash() && (had.Renew == 0 || now.Unix() < had.Renew) {
			continue
		}
		times := &tokenTimes{objects: objs}
		var p payload
		if err == nil {
			p, err = volumePayload(ctx, pod, v, times, facts)
		}
		var staged []file
		if err == nil {
			staged, err = stagePayload(dir+"/"+v.Name, p)
		}
		if err != nil {
			var notNow *notYet
			if errors.As(mountError(ctx, v, err), &notNow) {
				r.problem = notNow.Message
			}
			continue
		}
		version := refreshed{Name: v.Name}
		r.files = append(r.files, file{Name: dir + "/" + v.Name, Mode: fs.ModeDir | 0o700})
		for _, f := range staged {
			switch {
			case f.Link == "":
				r.files = append(r.files, f)
			case path.Base(f.Name) == "..data":
				version.Version = f.Link
			}
		}
		// What a subPath has shown of a version is in use as long as the container.
		for _, c := range allContainers(pod) {
			for _, m := range c.VolumeMounts {
				version.Keep = version.Keep || m.Name == v.Name && (m.SubPath != "" || m.SubPathExpr != "")
			}
		}
		data.Volumes = append(data.Volumes, version)
		r.sent[v.Name] = times.sent(p)
	}
	if len(data.Volumes) == 0 {
		return refresh{problem: r.problem}
	}
	text, err := render("refresh.sh.tmpl", data)
	if err != nil {
		return refresh{problem: err.Error()}
	}
	r.files = append([]file{{Name: dir, Mode: fs.ModeDir | 0o700}}, append(r.files, file{Name: dir + "/do", Mode: 0o600, Body: []byte(text)})...)
	return r
}

// refreshData is the data of refresh.sh.tmpl.
type refreshData struct {
	Number  int64
	Volumes []refreshed
	scratchData
}

type refreshed struct {
	Name, Version string
	Keep          bool
}

// followed says whether something may reach the pod's directory: a pod that ends
// gets nothing any more, as under a kubelet.
func (w *work) followed() bool {
	return w.staged && !w.unsure && !w.sealed && !w.hint && w.pod != nil && !w.deleting() && w.refused == nil && !w.jobGone() && (!w.has("done") || w.requeued())
}

// refreshChange is a refresh as a change of what the directory has by now.
func (w *work) refreshChange() (*change, error) {
	meta := w.meta
	meta.Sent = maps.Clone(meta.Sent)
	if meta.Sent == nil {
		meta.Sent = map[string]sentVolume{}
	}
	maps.Copy(meta.Sent, w.refresh.sent)
	data, err := json.Marshal(meta)
	if err != nil {
		return nil, fmt.Errorf("writing meta: %w", err)
	}
	uid := string(w.meta.UID)
	return &change{
		UID: uid, Meta: meta, refresh: w.refresh,
		Files:    append(slices.Clone(w.refresh.files), file{Name: "meta", Mode: 0o600, Body: append(data, '\n')}),
		Commands: []command{{UID: uid, Verb: "refresh", Container: "-", Number: w.refresh.number}},
	}, nil
}
