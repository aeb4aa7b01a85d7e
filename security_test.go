package knoc

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
)

// The root of a container is new at each start, and nothing stays on the node:
// not of this pod, and not of one whose job was killed.
func TestPodScriptScratch(t *testing.T) {
	t.Parallel()
	eachShell(t, func(t *testing.T, shell []string) {
		b, tmp := newBase(t), t.TempDir()
		base := filepath.Join(tmp, fmt.Sprintf("knoc-%d", os.Getuid()))
		pod := scriptPod(v1.RestartPolicyOnFailure, shContainer("a", `
			echo "$KNOC_TEST_ROOT"
			[ -d "$KNOC_TEST_ROOT" ] && [ ! -e "$KNOC_TEST_ROOT/new" ] || exit 9
			mkdir -p "$KNOC_TEST_ROOT/new/none"
			chmod 0 "$KNOC_TEST_ROOT/new/none" "$KNOC_TEST_ROOT/new"
			[ -e tried ] || { : >tried; exit 7; }`))
		w := stageScript(t, b, pod, nil)
		stat, err := os.ReadFile("/proc/self/stat")
		if err != nil {
			t.Fatal(err)
		}
		f := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
		alive := filepath.Join(base, fmt.Sprintf("5.%d.%s", os.Getpid(), f[19]))
		for _, d := range []string{alive + "/main", base + "/5.1.7/main", base + fmt.Sprintf("/6.%d.1/main", os.Getpid()), base + "/other"} {
			if err := os.MkdirAll(d, 0o700); err != nil {
				t.Fatal(err)
			}
		}
		w.start(shell, "7", "TMPDIR="+tmp)
		if code := w.end(); code != 0 {
			t.Errorf("exit code %d: %s %s %s", code, w.read("journal.0"), w.read("log/a.0"), w.stderr.String())
		}
		if log := w.read("log/a.1"); !strings.HasPrefix(log, base+"/7.") || !strings.HasSuffix(log, "/a\n") {
			t.Errorf("root %q, want one of job 7 below %s", log, base)
		}
		left, err := filepath.Glob(base + "/*")
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff([]string{alive, base + "/other"}, left); diff != "" {
			t.Errorf("left on the node (-want +got):\n%s\n%s", diff, w.stderr.String())
		}
	})
}

// A directory that somebody else made before is not used.
func TestPodScriptScratchOfOthers(t *testing.T) {
	t.Parallel()
	eachShell(t, func(t *testing.T, shell []string) {
		tmp, other := t.TempDir(), t.TempDir()
		base := filepath.Join(tmp, fmt.Sprintf("knoc-%d", os.Getuid()))
		if err := os.Symlink(other, base); err != nil {
			t.Fatal(err)
		}
		w := stageScript(t, newBase(t), scriptPod(v1.RestartPolicyNever, shContainer("a", `echo "$KNOC_TEST_ROOT"`)), nil)
		w.start(shell, "7", "TMPDIR="+tmp)
		if code := w.end(); code != 0 || !strings.HasPrefix(w.read("log/a.0"), base+".") {
			t.Errorf("exit code %d, root %q; stderr: %s", code, w.read("log/a.0"), w.stderr.String())
		}
		if left, _ := filepath.Glob(tmp + "/*"); len(left) != 1 {
			t.Errorf("left: %q", left)
		}
	})
}

// A set-uid runtime lets nobody overlay a directory.
func TestPodScriptSetUID(t *testing.T) {
	t.Parallel()
	eachShell(t, func(t *testing.T, shell []string) {
		b := newBase(t)
		starter := filepath.Join(b.dir, "libexec/apptainer/bin/starter-suid")
		if err := os.MkdirAll(filepath.Dir(starter), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(starter, nil, 0o700); err != nil {
			t.Fatal(err)
		}
		for mode, want := range map[os.FileMode]string{0o700: "overlay\n", 0o700 | os.ModeSetuid: "tmpfs\n"} {
			if err := os.Chmod(starter, mode); err != nil {
				t.Fatal(err)
			}
			pod := scriptPod(v1.RestartPolicyNever, shContainer("a", `echo "${KNOC_TEST_ROOT:+overlay}${KNOC_TEST_TMPFS:+tmpfs}"`))
			w := stageScript(t, b, pod, nil)
			os.Remove(filepath.Join(w.dir, "log/a.0"))
			w.start(shell, "7")
			if code := w.end(); code != 0 || w.read("log/a.0") != want {
				t.Errorf("mode %v: exit code %d, log %q, want %q", mode, code, w.read("log/a.0"), want)
			}
		}
	})
}

func TestPodScriptHosts(t *testing.T) {
	t.Parallel()
	eachShell(t, func(t *testing.T, shell []string) {
		pod := scriptPod(v1.RestartPolicyNever, shContainer("a", ":"))
		pod.Spec.Subdomain = "db"
		pod.Spec.HostAliases = []v1.HostAlias{{IP: "192.0.2.1", Hostnames: []string{"it's", `\t$(id)`}}}
		w := stageScript(t, newBase(t), pod, nil)
		w.start(shell, "7")
		w.end()
		machine, err := os.ReadFile("/etc/hosts")
		if err != nil {
			t.Fatal(err)
		}
		rest, ok := strings.CutPrefix(w.read("run/pod.hosts"), string(machine))
		for _, line := range strings.SplitAfter(strings.TrimSuffix(rest, "\n"), "\n") {
			if ip, names, _ := strings.Cut(line, "\t"); ok && names == "test.db.default.svc.cluster.local\ttest\n" && ip != "" {
				rest = strings.Replace(rest, line, "", 1)
			}
		}
		if want := "\n# Entries added by HostAliases.\n192.0.2.1\tit's\t\\t$(id)\n"; !ok || rest != want {
			t.Errorf("after the machine's own %q, want %q", rest, want)
		}
	})
}

func TestPodScriptResolver(t *testing.T) {
	t.Parallel()
	value := "7"
	config := &v1.PodDNSConfig{Nameservers: []string{"192.0.2.1"}, Searches: []string{"a.example", "b.example"}, Options: []v1.PodDNSConfigOption{{Name: "ndots", Value: &value}, {Name: "edns0"}}}
	machine, _ := os.ReadFile("/etc/resolv.conf")
	eachShell(t, func(t *testing.T, shell []string) {
		for policy, want := range map[v1.DNSPolicy]string{v1.DNSNone: "nameserver 192.0.2.1\nsearch a.example b.example\noptions ndots:7 edns0\n", v1.DNSDefault: ""} {
			pod := scriptPod(v1.RestartPolicyNever, shContainer("a", ":"))
			pod.Spec.DNSPolicy, pod.Spec.DNSConfig = policy, config
			w := stageScript(t, newBase(t), pod, nil)
			if !strings.Contains(w.read("pod.sh"), "destination=/etc/resolv.conf'") {
				t.Error("it is not mounted")
			}
			w.start(shell, "7")
			w.end()
			w.order("exit a 0 0", "done 0")
			got := w.read("run/pod.resolv")
			if policy == v1.DNSNone {
				if got != want {
					t.Errorf("%q, want %q", got, want)
				}
				continue
			}
			for line := range strings.Lines(string(machine)) {
				if strings.HasPrefix(line, "nameserver ") && !strings.Contains(got, strings.TrimSpace(line)) {
					t.Errorf("%q lacks the machine's %q", got, line)
				}
			}
			if !strings.Contains(got, "nameserver 192.0.2.1\nsearch ") || !strings.Contains(got, "a.example b.example\noptions ") || strings.Count(got, "ndots") != 1 || !strings.Contains(got, "ndots:7 edns0\n") {
				t.Errorf("%q", got)
			}
		}
	})
}

// Where there are no subordinate ids the pod does not run, or as if it had named
// no ids.
func TestPodScriptWithoutSubIDs(t *testing.T) {
	t.Parallel()
	eachShell(t, func(t *testing.T, shell []string) {
		for policy, want := range map[string][]string{
			idsRefuse: {"noids subuid", "done 1"},
			idsIgnore: {"noids subuid", "start a 0", "exit a 0 0", "done 0"},
		} {
			t.Run(policy, func(t *testing.T) {
				t.Parallel()
				b, tmp := newBase(t), t.TempDir()
				for _, name := range []string{"newuidmap", "newgidmap", "nsenter", "id"} {
					if err := os.WriteFile(filepath.Join(b.bin, name), []byte("#!/bin/sh\necho nobody-at-all\n"), 0o700); err != nil {
						t.Fatal(err)
					}
				}
				user := int64(1234)
				pod := scriptPod(v1.RestartPolicyNever, shContainer("a", "echo ran"))
				pod.Spec.SecurityContext = &v1.PodSecurityContext{RunAsUser: &user, FSGroup: &user}
				pod.Spec.Volumes = []v1.Volume{{Name: "v"}}
				w := stageScript(t, b, pod, nil)
				s, err := newPodScript(pod, scriptConfig{Dir: w.dir, WithoutSubIDs: policy})
				if err != nil {
					t.Fatal(err)
				}
				text, err := s.render()
				if err != nil {
					t.Fatal(err)
				}
				w.write("pod.sh", text)
				if err := os.MkdirAll(filepath.Join(w.dir, "vol/v"), 0o700); err != nil {
					t.Fatal(err)
				}
				w.start(shell, "7", "TMPDIR="+tmp)
				w.end()
				if diff := cmp.Diff(want, w.facts("journal.0")); diff != "" {
					t.Errorf("journal (-want +got):\n%s\n%s%s", diff, w.read("log/a.0"), w.stderr.String())
				}
				if left, _ := filepath.Glob(tmp + "/*"); len(left) > 0 {
					t.Errorf("left: %q", left)
				}
				f := newFacts(parseJournal([]byte(w.read("journal.0"))))
				end := ending(pod, &observed{}, f)
				if policy == idsRefuse && (end == nil || end.reason != "NoSubordinateIDs" || !strings.Contains(end.message, "/etc/subuid")) {
					t.Errorf("ending %+v", end)
				}
			})
		}
	})
}

func TestHostName(t *testing.T) {
	t.Parallel()
	long, override := strings.Repeat("a", 62)+"-bcd", "other"
	for _, tc := range []struct {
		spec         v1.PodSpec
		pod          string
		name, domain string
	}{
		{v1.PodSpec{}, "web-0", "web-0", ""},
		{v1.PodSpec{}, long, strings.Repeat("a", 62), ""},
		{v1.PodSpec{Hostname: "h"}, "web-0", "h", ""},
		{v1.PodSpec{Hostname: "h", Subdomain: "s"}, "web-0", "h", "s.ns.svc.example.org"},
		{v1.PodSpec{Subdomain: "s"}, "web-0", "web-0", "s.ns.svc.example.org"},
		{v1.PodSpec{Subdomain: "s", HostnameOverride: &override}, "web-0", "other", ""},
		{v1.PodSpec{HostNetwork: true, Subdomain: "s"}, "web-0", "", ""},
	} {
		pod := &v1.Pod{Spec: tc.spec}
		pod.Name, pod.Namespace = tc.pod, "ns"
		if name, domain := hostName(pod, "example.org"); name != tc.name || domain != tc.domain {
			t.Errorf("hostName(%+v) = %q, %q; want %q, %q", tc.spec, name, domain, tc.name, tc.domain)
		}
	}
}
