//go:build testbed

package e2e

import (
	"encoding/json"
	"os/exec"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// seen is every version of every pod that the API server had since the tests
// began: one kubectl for all tests, instead of one for each look.
var seen *store

type store struct {
	mu      sync.Mutex
	pods    map[types.UID]*record
	changed chan struct{} // closed and made anew at each change
	closed  bool
	watch   *exec.Cmd
}

// record is what was seen of one pod.
type record struct {
	versions []*v1.Pod
	gone     bool
}

func (r *record) last() *v1.Pod {
	if len(r.versions) == 0 {
		return nil
	}
	return r.versions[len(r.versions)-1]
}

func newStore() *store {
	s := &store{pods: map[types.UID]*record{}, changed: make(chan struct{})}
	go s.follow()
	return s
}

// follow runs kubectl again when it ends: the API server ends watches at times.
func (s *store) follow() {
	for {
		c := exec.Command("kubectl", "get", "pods", "--all-namespaces", "--watch", "--output-watch-events", "-o", "json")
		out, err := c.StdoutPipe()
		if err != nil {
			panic(err)
		}
		s.mu.Lock()
		if s.closed {
			s.mu.Unlock()
			return
		}
		s.watch = c
		err = c.Start()
		s.mu.Unlock()
		for d := json.NewDecoder(out); err == nil; {
			var e struct {
				Type   string
				Object v1.Pod
			}
			if err = d.Decode(&e); err == nil {
				s.add(e.Type, &e.Object)
			}
		}
		c.Wait()
		time.Sleep(time.Second)
	}
}

func (s *store) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	s.watch.Process.Kill()
}

func (s *store) add(event string, p *v1.Pod) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.pods[p.UID]
	if r == nil {
		r = &record{}
		s.pods[p.UID] = r
	}
	if last := r.last(); last == nil || last.ResourceVersion != p.ResourceVersion {
		r.versions = append(r.versions, p)
	}
	r.gone = event == "DELETED"
	close(s.changed)
	s.changed = make(chan struct{})
}

// get is a copy of the record as it is now.
func (s *store) get(uid types.UID) *record {
	s.mu.Lock()
	defer s.mu.Unlock()
	if r := s.pods[uid]; r != nil {
		c := *r
		return &c
	}
	return &record{}
}

// wait waits until wanted holds for a pod's record.
func (s *store) wait(uid types.UID, limit time.Duration, wanted func(*record) bool) (*record, bool) {
	timeout := time.After(limit)
	for {
		s.mu.Lock()
		changed := s.changed
		s.mu.Unlock()
		if r := s.get(uid); wanted(r) {
			return r, true
		}
		select {
		case <-changed:
		case <-timeout:
			return s.get(uid), false
		}
	}
}
