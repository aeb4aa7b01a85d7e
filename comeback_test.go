package knoc

import (
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
)

// A job whose launch failed is taken back into the queue by Slurm, although it was
// submitted with --no-requeue: its pod has not failed until squeue has shown for a
// while that it does not come back.
func TestLaunchFailed(t *testing.T) {
	t.Parallel()
	const failed = "7|NODE_FAIL|None|batch|n1|1700000000|1700000001|knoc-uid-a\n"
	const waits = "7|PENDING|launch failed requeued held|batch||N/A|N/A|knoc-uid-a\n"
	begin := time.Unix(1700000001, 0)
	for _, tc := range []struct {
		name    string
		journal string
		requeue bool
		texts   []string // of squeue, a quarter of a minute apart
		over    []bool
	}{
		{"comes back", "", false, []string{failed, failed, waits, waits, waits}, []bool{false, false, false, false, false}},
		{"comes back late", "", false, []string{failed, failed, failed, waits, waits}, []bool{false, false, false, false, false}},
		{"does not", "", false, []string{failed, failed, failed, failed}, []bool{false, false, false, true}},
		{"is forgotten", "", false, []string{failed, failed, "", ""}, []bool{false, false, false, true}},
		{"had begun", "1700000000 claim 7\n1700000000 start a 0\n", false, []string{failed, failed, failed, failed}, []bool{false, false, false, true}},
		{"may be requeued", "1700000000 claim 7\n1700000000 start a 0\n", true, []string{failed, failed, waits, waits, waits}, []bool{false, false, false, false, false}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			pod := scriptPod(v1.RestartPolicyNever, shContainer("a", "true"))
			if tc.requeue {
				pod.Annotations = map[string]string{requeueAnnotation: "true"}
			}
			w := &work{pod: pod, staged: true}
			w.setJob("7", begin.Add(-time.Minute))
			w.read(0, 0, []byte(tc.journal), begin.Add(-time.Second), begin.Add(-time.Second))
			l := &loop{KNOCProvider: &KNOCProvider{}}
			for i, text := range tc.texts {
				asked := begin.Add(time.Duration(i) * 15 * time.Second)
				jobs, err := parseSqueue([]byte(text))
				if err != nil {
					t.Fatal(err)
				}
				if len(jobs) > 0 {
					w.observe(jobs[0], asked)
				} else {
					l.absent(w, asked)
				}
				if next := i + 1; next < len(tc.texts) || tc.over[i] {
					w.read(0, int64(len(tc.journal)), nil, asked.Add(time.Second), asked.Add(time.Second))
				}
				if w.over != tc.over[i] {
					t.Fatalf("after %d answers of squeue over is %v, want %v", i+1, w.over, tc.over[i])
				}
				s := fold(pod, w.view(""))
				if terminalPhase(s.Phase) != tc.over[i] {
					t.Fatalf("after %d answers of squeue the pod is %s", i+1, s.Phase)
				}
				if strings.HasPrefix(text, "7|PENDING") && s.Phase != v1.PodPending {
					t.Fatalf("a pod whose job waits again is %s", s.Phase)
				}
			}
		})
	}
}
