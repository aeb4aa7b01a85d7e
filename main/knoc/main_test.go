package main

import (
	"bytes"
	"context"
	"flag"
	"log/slog"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/CARV-ICS-FORTH/knoc"
	"github.com/google/go-cmp/cmp"
)

// defaults are what no flag and no variable gives.
func defaults() knoc.Config {
	c := knoc.Config{NodeName: "knoc", OS: "linux", Listen: ":10250"}
	c.SSH.StreamConnections = 4
	return c
}

func TestParse(t *testing.T) {
	for _, c := range []struct {
		name string
		args []string
		env  map[string]string
		want func(*knoc.Config)
	}{
		{name: "nothing", want: func(*knoc.Config) {}},
		{name: "flags", args: []string{"--nodename=n", "--ssh", "a@b:2", "--taint", "none", "-poll", "5s"}, want: func(c *knoc.Config) {
			c.NodeName, c.SSH.Address, c.Taints, c.Poll = "n", "a@b:2", []string{"none"}, 5*time.Second
		}},
		{name: "lists", args: []string{"--ssh-jump", "a@x, b@y:22", "--insecure-registry", "r:1", "--insecure-registry", "r:2"}, want: func(c *knoc.Config) {
			c.SSH.Jumps, c.InsecureRegistries = []string{"a@x", "b@y:22"}, []string{"r:1", "r:2"}
		}},
		{name: "environment", env: map[string]string{"KNOC_SSH_KEY": "k", "KNOC_LABEL": "a=1,b=2", "KUBECONFIG": "kc"}, want: func(c *knoc.Config) {
			c.SSH.KeyFile, c.Labels, c.Kubeconfig = "k", []string{"a=1", "b=2"}, "kc"
		}},
		{name: "flags over environment", args: []string{"--label", "c=3", "--kubeconfig", "f"}, env: map[string]string{"KNOC_LABEL": "a=1,b=2", "KUBECONFIG": "kc", "KNOC_KUBECONFIG": "kk"}, want: func(c *knoc.Config) {
			c.Labels, c.Kubeconfig = []string{"c=3"}, "f"
		}},
		{name: "the first KNoC", env: map[string]string{
			"REMOTE_HOST": "login", "REMOTE_PORT": "2222", "REMOTE_USER": "bob", "REMOTE_KEY": "key",
			"VKUBELET_POD_IP": "10.0.0.9", "KUBELET_PORT": "10260", "APISERVER_CERT_LOCATION": "c.pem", "APISERVER_KEY_LOCATION": "k.pem",
		}, want: func(c *knoc.Config) {
			c.SSH.Address, c.SSH.KeyFile, c.InternalIP, c.Listen = "bob@login:2222", "key", "10.0.0.9", ":10260"
			c.TLSCert, c.TLSKey = "c.pem", "k.pem"
		}},
		{name: "today's over the first KNoC's", env: map[string]string{"REMOTE_HOST": "old", "KNOC_SSH": "x@new"}, want: func(c *knoc.Config) {
			c.SSH.Address = "x@new"
		}},
		{name: "an IPv6 host", env: map[string]string{"REMOTE_HOST": "fd00::1", "REMOTE_PORT": "22"}, want: func(c *knoc.Config) {
			c.SSH.Address = "[fd00::1]:22"
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := parse(c.args, func(k string) string { return c.env[k] })
			if err != nil {
				t.Fatal(err)
			}
			want := defaults()
			c.want(&want)
			if d := cmp.Diff(want, got.config); d != "" {
				t.Fatal(d)
			}
		})
	}
}

func TestParseRefuses(t *testing.T) {
	for _, c := range []struct {
		args []string
		env  map[string]string
		want string
	}{
		{args: []string{"--nodname", "x"}, want: "-nodname"},
		{args: []string{"--poll", "5"}, want: `"5"`},
		{args: []string{"--ssh-connections", "many"}, want: `"many"`},
		{args: []string{"--log-level", "loud"}, want: `"loud"`},
		{args: []string{"--log-format", "xml"}, want: `--log-format "xml"`},
		{args: []string{"--nodename", "x", "extra"}, want: `"extra"`},
		{args: []string{"--ssh"}, want: "ssh"},
		{env: map[string]string{"KNOC_POLL": "soon"}, want: "KNOC_POLL"},
	} {
		_, err := parse(c.args, func(k string) string { return c.env[k] })
		if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%v %v: %v", c.args, c.env, err)
		}
	}
}

func TestEveryFlagIsInHelp(t *testing.T) {
	var b bytes.Buffer
	usage(&b)
	flagSet(&options{}).VisitAll(func(f *flag.Flag) {
		if strings.Count(b.String(), "\n  --"+f.Name+" ") != 1 {
			t.Errorf("--%s is not once in --help", f.Name)
		}
	})
}

func TestRun(t *testing.T) {
	none := func(string) string { return "" }
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"--help"}, "Usage: knoc"},
		{[]string{"-h"}, "Usage: knoc"},
		{[]string{"version"}, "knoc "},
		{[]string{"--version"}, "knoc "},
	} {
		var out, errs bytes.Buffer
		if err := run(context.Background(), c.args, none, &out, &errs); err != nil || !strings.HasPrefix(strings.TrimPrefix(out.String(), "knoc is a Kubernetes node whose pods run as jobs of a Slurm cluster, over SSH.\n\n"), c.want) || errs.Len() > 0 {
			t.Errorf("%v: %v %q %q", c.args, err, out.String(), errs.String())
		}
	}
	missing := filepath.Join(t.TempDir(), "kubeconfig")
	var out, errs bytes.Buffer
	if err := run(context.Background(), []string{"--kubeconfig", missing}, none, &out, &errs); err == nil || !strings.Contains(err.Error(), missing) {
		t.Errorf("a missing kubeconfig: %v", err)
	}
}

func TestLogLevel(t *testing.T) {
	o, err := parse([]string{"--log-level", "debug", "--log-format=json"}, func(string) string { return "" })
	if err != nil || o.logLevel != slog.LevelDebug || o.logFormat != "json" {
		t.Fatalf("%+v %v", o, err)
	}
}
