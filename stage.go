package knoc

import (
	"context"
	"encoding/json"
	"fmt"
	"io/fs"
	"maps"
	"strings"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// staging is what became of making one pod's files.
type staging struct {
	files   []file
	sent    map[string]sentVolume
	ignored []string // sentences about fields that are not honoured
	err     error    // *refusal, *notYet, or an error worth another try
}

// stageAll makes the files of several pods; the API server is asked for a few
// at a time.
func (p *KNOCProvider) stageAll(ctx context.Context, pods map[types.UID]*v1.Pod) map[types.UID]staging {
	const parallel = 8
	var mu sync.Mutex
	var wg sync.WaitGroup
	slots := make(chan struct{}, parallel)
	all := map[types.UID]staging{}
	for uid, pod := range pods {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			s := staging{}
			s.files, s.sent, s.ignored, s.err = p.stage(ctx, pod)
			mu.Lock()
			defer mu.Unlock()
			all[uid] = s
		})
	}
	wg.Wait()
	return all
}

// stage makes all files of a pod's directory but ready.
func (p *KNOCProvider) stage(ctx context.Context, pod *v1.Pod) ([]file, map[string]sentVolume, []string, error) {
	return p.stageIn(ctx, pod, p.remote.dir+"/"+string(pod.UID))
}

// stageIn is stage for any directory on the cluster. It is the one code path for
// every way a pod comes there.
func (p *KNOCProvider) stageIn(ctx context.Context, pod *v1.Pod, dir string) (files []file, sent map[string]sentVolume, ignored []string, err error) {
	if ignored, err = checkPod(pod); err != nil {
		return nil, nil, ignored, err
	}
	options, err := sbatchOptions(pod, p.cfg.Partition)
	if err != nil {
		return nil, nil, ignored, err
	}
	facts, objs := p.nodeFacts(), readOnce(p.objs)
	services, sentence, err := p.podServices(ctx, pod)
	if err != nil {
		return nil, nil, ignored, err
	}
	facts.Services = services
	if sentence != "" {
		ignored = append(ignored, sentence)
	}
	files, sent, err = stageVolumes(ctx, pod, objs, facts)
	if err != nil {
		return nil, nil, ignored, err
	}
	var all []byte
	for _, c := range allContainers(pod) {
		vars, err := stageEnv(ctx, pod, c, objs, facts)
		if err != nil {
			return nil, nil, ignored, err
		}
		body, err := envFile(vars, p.cfg.Runtime, isMapped(pod))
		if err != nil {
			return nil, nil, ignored, err
		}
		files = append(files, file{Name: "env/" + c.Name, Mode: 0o600, Body: body})
		all = append(all, body...)
	}
	helpers, err := envHelpers(all)
	if err != nil {
		return nil, nil, ignored, err
	}
	files = append(files, helpers...)
	cfg := p.scriptConfig(dir, options)
	if cfg.Hosted, err = hostVolumes(ctx, pod, p.objs, p.cfg); err != nil {
		return nil, nil, ignored, err
	}
	var missing []string
	if cfg.Credentials, missing, err = pullSecrets(ctx, pod, objs); err != nil {
		return nil, nil, ignored, err
	}
	files = append(files, pullFiles(pod, allContainers(pod), cfg)...)
	script, err := newPodScript(pod, cfg)
	if err != nil {
		return nil, nil, ignored, err
	}
	text, err := script.render()
	if err != nil {
		return nil, nil, ignored, err
	}
	enter, err := render("enter.sh.tmpl", script)
	if err != nil {
		return nil, nil, ignored, err
	}
	probes, err := newProbeScript(pod, dir)
	if err != nil {
		return nil, nil, ignored, err
	}
	if probes != nil {
		text, err := probes.render()
		if err != nil {
			return nil, nil, ignored, err
		}
		files = append(files, file{Name: "run/probe.sh", Mode: 0o700, Body: []byte(text)})
	}
	if script.Places() {
		text, err := render("places.sh.tmpl", script)
		if err != nil {
			return nil, nil, ignored, err
		}
		if err := checkText("run/places.sh", text); err != nil {
			return nil, nil, ignored, err
		}
		files = append(files, file{Name: "run/places.sh", Mode: 0o700, Body: []byte(text)})
	}
	pull, err := render("pull.sh.tmpl", newPullScript(script.Runtime, p.cfg.ImageCacheLimit))
	if err != nil {
		return nil, nil, ignored, err
	}
	m := metaOf(pod)
	m.Sent = sent
	meta, err := json.Marshal(m)
	if err != nil {
		return nil, nil, ignored, fmt.Errorf("writing meta: %w", err)
	}
	dirs := []file{}
	for _, name := range []string{"cmd", "env", "log", "msg", "run", "vol"} {
		dirs = append(dirs, file{Name: name, Mode: fs.ModeDir | 0o700})
	}
	if len(missing) > 0 && p.api != nil {
		p.api.Event(pod, "", v1.EventTypeWarning, "FailedToRetrieveImagePullSecret",
			fmt.Sprintf("Unable to retrieve some image pull secrets (%s); attempting to pull the image may not succeed.", strings.Join(missing, ", ")))
	}
	if mayRequeue(pod) {
		files = append(files, file{Name: "requeue", Mode: 0o600}) // for submit.sh
	}
	return append(append(dirs, files...),
		file{Name: "meta", Mode: 0o600, Body: append(meta, '\n')},
		file{Name: "run/enter.sh", Mode: 0o700, Body: []byte(enter)},
		file{Name: "run/pull.sh", Mode: 0o700, Body: []byte(pull)},
		file{Name: "pod.sh", Mode: 0o700, Body: []byte(text)},
	), sent, ignored, nil
}

// scriptConfig is for a script in that directory on the cluster.
func (p *KNOCProvider) scriptConfig(dir string, options []string) scriptConfig {
	return scriptConfig{
		Dir:                dir,
		Runtime:            p.cfg.Runtime,
		InsecureRegistries: p.cfg.InsecureRegistries,
		ImageRewrites:      p.rewrites,
		WritableRoot:       p.cfg.WritableRoot,
		WithoutSubIDs:      p.cfg.WithoutSubIDs,
		ClusterDomain:      p.cfg.ClusterDomain,
		UsageSeconds:       int(max(0, p.cfg.UsageInterval/time.Second)),
		HostPaths:          allowedPaths(p.cfg),
		Options:            options,
	}
}

// nodeFacts are what a container may learn of its node: what the Node object
// shows as allocatable.
func (p *KNOCProvider) nodeFacts() nodeFacts {
	state := p.nodeState()
	list := v1.ResourceList{}
	if state.Known {
		list = slurmCapacity(state.Resources)
	}
	fixed, err := p.node.capacity()
	if err == nil { // it was checked at the start
		maps.Copy(list, fixed)
	}
	return nodeFacts{Allocatable: list}
}
