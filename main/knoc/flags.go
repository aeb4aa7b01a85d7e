package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"slices"
	"strings"

	"github.com/CARV-ICS-FORTH/knoc"
	"k8s.io/apimachinery/pkg/api/resource"
)

// options is what a command line and an environment say.
type options struct {
	config    knoc.Config
	logLevel  slog.Level
	logFormat string
	version   bool
}

// groups are the flags in the order of --help.
var groups = []struct {
	title string
	names []string
}{
	{"Kubernetes", []string{"kubeconfig", "cluster-id"}},
	{"The node", []string{"nodename", "os", "provider-config", "taint", "label", "internal-ip"}},
	{"The kubelet port (closed unless all of --tls-cert, --tls-key and --client-ca are given)", []string{"listen", "tls-cert", "tls-key", "client-ca"}},
	{"SSH to the login node", []string{"ssh", "ssh-key", "ssh-key-passphrase-file", "ssh-known-hosts", "ssh-jump", "ssh-connections"}},
	{"Slurm and the compute nodes", []string{"remote-dir", "partition", "runtime", "insecure-registry", "image-rewrite", "image-cache-limit", "writable-root", "without-subids", "cluster-domain", "api-server-for-pods", "usage-interval", "host-path", "volume-path", "poll"}},
	{"Log and metrics", []string{"log-level", "log-format", "metrics-listen", "pprof", "version"}},
}

// flagSet defines the flags. A word in back quotes names the value in --help.
func flagSet(o *options) *flag.FlagSet {
	c := &o.config
	f := flag.NewFlagSet("knoc", flag.ContinueOnError)
	f.SetOutput(io.Discard) // run says it in one line
	f.Usage = func() {}

	f.StringVar(&c.Kubeconfig, "kubeconfig", "", "`file` with the API server and who to be there; default $KUBECONFIG, else the service account of knoc's own pod")
	f.StringVar(&c.ClusterID, "cluster-id", "", "`id` that keeps this cluster's files apart on the HPC side; default the UID of Service default/kubernetes")

	f.StringVar(&c.NodeName, "nodename", "knoc", "`name` of the virtual node")
	f.StringVar(&c.OS, "os", "linux", "`system` that pods run on")
	f.StringVar(&c.ProviderConfig, "provider-config", "", "JSON or YAML `file` that sets cpu, memory and pods of nodes; default what Slurm has")
	f.Var(&list{to: &c.Taints}, "taint", "`key=value:effect` of the node at its creation, or none; default virtual-kubelet.io/provider=knoc:NoSchedule (list)")
	f.Var(&list{to: &c.Labels}, "label", "`key=value` of the node (list)")
	f.StringVar(&c.InternalIP, "internal-ip", "", "`address` where the API server reaches the kubelet port; default that of --listen, else this machine's")

	f.StringVar(&c.Listen, "listen", ":10250", "`address` of the kubelet port")
	f.StringVar(&c.TLSCert, "tls-cert", "", "PEM `file`: certificate of the kubelet port")
	f.StringVar(&c.TLSKey, "tls-key", "", "PEM `file`: its key")
	f.StringVar(&c.ClientCA, "client-ca", "", "PEM `file`: the CA of callers' certificates, the API server's among them")

	f.StringVar(&c.SSH.Address, "ssh", "", "`user@host[:port]` of the login node")
	f.StringVar(&c.SSH.KeyFile, "ssh-key", "", "private key `file`; default the keys of ssh-agent")
	f.StringVar(&c.SSH.PassphraseFile, "ssh-key-passphrase-file", "", "`file` with the key's passphrase")
	f.Var(&list{to: &c.SSH.KnownHosts}, "ssh-known-hosts", "`file` of host keys; default ~/.ssh/known_hosts and /etc/ssh/ssh_known_hosts (list)")
	f.Var(&list{to: &c.SSH.Jumps}, "ssh-jump", "`user@host[:port]` to go through, in this order (list)")
	f.IntVar(&c.SSH.StreamConnections, "ssh-connections", 4, "`number` of connections for logs, exec and port-forward, of 8 streams each")

	f.StringVar(&c.RemoteDir, "remote-dir", "", "absolute `path` of knoc's files on the cluster; default $KNOC_DIR there, else ~/.knoc")
	f.StringVar(&c.Partition, "partition", "", "Slurm `partition` of the jobs; default Slurm's own")
	f.StringVar(&c.Runtime, "runtime", "", "container `runtime` on the compute nodes, name or path; default apptainer")
	f.Var(&list{to: &c.InsecureRegistries}, "insecure-registry", "`host:port` of an image registry that speaks plain HTTP (list)")
	f.Var(&list{to: &c.ImageRewrites}, "image-rewrite", "`from=to`: images whose full name begins with from, such as docker.io, are pulled from to, such as mirror.example.org/hub (list)")
	f.Var(bytesFlag{&c.ImageCacheLimit}, "image-cache-limit", "`size` of the image cache on the cluster, such as 200Gi: what was not used for longest is removed, nothing that is in use; default no limit")
	f.Var(&choice{&c.WritableRoot, []string{"scratch", "memory", "none"}}, "writable-root", "`where` what a container writes outside of its volumes goes: scratch (on the compute node), memory (of 64 MB) or none; default scratch")
	f.Var(&choice{&c.WithoutSubIDs, []string{"refuse", "ignore"}}, "without-subids", "`what` to do with runAsUser, fsGroup, … where the user has no subordinate ids: refuse the pod or ignore them; default refuse")
	f.DurationVar(&c.UsageInterval, "usage-interval", 0, "`interval` at which a job writes down what its containers use, for kubectl top; negative: never; default 15s")
	f.StringVar(&c.ClusterDomain, "cluster-domain", "", "`domain` in the host name of pods with a subdomain; default cluster.local")
	f.StringVar(&c.APIServerForPods, "api-server-for-pods", "", "`host[:port]` of the API server as compute nodes reach it, for KUBERNETES_SERVICE_HOST and its like in containers; default the address within the cluster")
	f.Var(&list{to: &c.HostPaths}, "host-path", "`directory` of the compute nodes that pods may mount by hostPath, with all below it; default none (list)")
	f.Var(&list{to: &c.VolumePaths}, "volume-path", "`path=directory`: what persistentVolumes have at that path, or NFS at server:/path, the compute nodes have in that directory (list)")
	f.DurationVar(&c.Poll, "poll", 0, "`interval` to ask the cluster at, for sites that dislike a held SSH session; default 0, watch it")

	f.StringVar(&c.MetricsListen, "metrics-listen", "", "`address` of knoc's own Prometheus metrics, /healthz and /readyz, in plain HTTP; default none")
	f.BoolVar(&c.Pprof, "pprof", false, "serve Go's profiles at --metrics-listen, under /debug/pprof/")
	f.TextVar(&o.logLevel, "log-level", slog.LevelInfo, "`level` from which on to log: debug, info, warn or error")
	f.StringVar(&o.logFormat, "log-format", "text", "`form` of the log: text or json")
	f.BoolVar(&o.version, "version", false, "print the version and stop")
	return f
}

// parse reads the command line over the environment: KNOC_<FLAG>, and what the
// first KNoC read, which is the weakest.
func parse(args []string, env func(string) string) (*options, error) {
	o := &options{}
	f := flagSet(o)
	old := map[string]string{
		"kubeconfig":  env("KUBECONFIG"),
		"ssh":         remoteAddress(env),
		"ssh-key":     env("REMOTE_KEY"),
		"internal-ip": env("VKUBELET_POD_IP"),
		"tls-cert":    env("APISERVER_CERT_LOCATION"),
		"tls-key":     env("APISERVER_KEY_LOCATION"),
	}
	if port := env("KUBELET_PORT"); port != "" {
		old["listen"] = ":" + port
	}
	var err error
	f.VisitAll(func(fl *flag.Flag) {
		value, from := env(envName(fl.Name)), envName(fl.Name)
		if value == "" {
			value, from = old[fl.Name], "the environment of the first KNoC"
		}
		// A --version from the environment would keep knoc from ever starting.
		if value == "" || fl.Name == "version" || err != nil {
			return
		}
		if e := fl.Value.Set(value); e != nil {
			err = fmt.Errorf("%s: invalid value %q for --%s: %w", from, value, fl.Name, e)
		}
		if l, ok := fl.Value.(*list); ok {
			l.begun = false // the command line's list replaces the environment's
		}
	})
	if err != nil {
		return nil, err
	}
	if err := f.Parse(args); err != nil {
		if err == flag.ErrHelp {
			return nil, err
		}
		return nil, fmt.Errorf("%w (knoc --help lists the flags)", err)
	}
	switch rest := f.Args(); {
	case len(rest) == 1 && rest[0] == "version":
		o.version = true
	case len(rest) == 1 && rest[0] == "help":
		return nil, flag.ErrHelp
	case len(rest) > 0:
		return nil, fmt.Errorf("unexpected argument %q (knoc --help lists the flags)", rest[0])
	}
	if o.logFormat != "text" && o.logFormat != "json" {
		return nil, fmt.Errorf("--log-format %q: text or json", o.logFormat)
	}
	return o, nil
}

func envName(flag string) string {
	return "KNOC_" + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// remoteAddress is user@host:port from the first KNoC's three variables.
func remoteAddress(env func(string) string) string {
	address := env("REMOTE_HOST")
	if address == "" {
		return ""
	}
	if port := env("REMOTE_PORT"); port != "" {
		address = net.JoinHostPort(address, port)
	}
	if user := env("REMOTE_USER"); user != "" {
		address = user + "@" + address
	}
	return address
}

// bytesFlag is a number of bytes, written as Kubernetes does.
type bytesFlag struct{ to *int64 }

func (b bytesFlag) String() string { return "" }

func (b bytesFlag) Set(s string) error {
	q, err := resource.ParseQuantity(s)
	if err != nil || q.Sign() < 0 {
		return errors.New("it is a size such as 200Gi")
	}
	*b.to = q.Value()
	return nil
}

// choice is a flag that takes one of a few words.
type choice struct {
	to    *string
	words []string
}

func (c *choice) String() string { return "" }

func (c *choice) Set(s string) error {
	if !slices.Contains(c.words, s) {
		return fmt.Errorf("it is one of %s", strings.Join(c.words, ", "))
	}
	*c.to = s
	return nil
}

// list is a flag that may be given more than once, and each time as a list with
// commas.
type list struct {
	to    *[]string
	begun bool
}

func (l *list) String() string { return "" }

func (l *list) Set(s string) error {
	if !l.begun {
		*l.to, l.begun = nil, true
	}
	for _, v := range strings.Split(s, ",") {
		if v = strings.TrimSpace(v); v != "" {
			*l.to = append(*l.to, v)
		}
	}
	return nil
}

func usage(w io.Writer) {
	f := flagSet(&options{})
	fmt.Fprint(w, `knoc is a Kubernetes node whose pods run as jobs of a Slurm cluster, over SSH.

Usage: knoc [flags]
       knoc version

Each flag is also an environment variable: --ssh-key is KNOC_SSH_KEY. Flags marked
(list) may be repeated, or take a list with commas.
`)
	for _, g := range groups {
		fmt.Fprintf(w, "\n%s:\n", g.title)
		for _, name := range g.names {
			fl := f.Lookup(name)
			value, text := flag.UnquoteUsage(fl)
			if d := fl.DefValue; d != "" && d != "0s" && d != "false" {
				text += "; default " + strings.ToLower(d)
			}
			fmt.Fprintf(w, "  %-34s%s\n", strings.TrimSpace("--"+name+" "+value), text)
		}
	}
	fmt.Fprint(w, `
The variables of the first KNoC are defaults: REMOTE_HOST, REMOTE_PORT, REMOTE_USER
(--ssh), REMOTE_KEY (--ssh-key), VKUBELET_POD_IP (--internal-ip), KUBELET_PORT
(--listen), APISERVER_CERT_LOCATION (--tls-cert), APISERVER_KEY_LOCATION (--tls-key).
`)
}
