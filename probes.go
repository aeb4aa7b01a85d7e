package knoc

import (
	"encoding/binary"
	"fmt"
	"net/http"
	"net/url"
	"regexp"
	"strconv"
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"
)

// probeScript is the data of probe.sh.tmpl, which looks after the containers of
// a pod as the kubelet's prober would.
type probeScript struct {
	Namespace, Name, UID string
	Dir                  string
	Second               int    // hundredths of a second; less in tests
	ProbeAgent           string // of requests that do not say their own
	Probes               []scriptProbe
	Hooks                []scriptProbe
}

// scriptProbe is one probe or HTTP hook of a container.
type scriptProbe struct {
	Container string
	Number    int    // of the container, as in podScript
	Kind      string // startup, readiness, liveness; post, pre
	Delay     int32
	Period    int32
	Timeout   int32
	Success   int32
	Failure   int32
	Grace     int64
	Check     []word // a function of the script, and its arguments
	Late      word   // what is said when an exec probe's time is over
}

// A probe or a hook that a container may have, with its kind in run/probe.sh and
// its field in the API.
type (
	kindOfProbe struct {
		Kind, Field string
		*v1.Probe
	}
	kindOfHook struct {
		Kind, Field string
		*v1.LifecycleHandler
	}
)

func containerProbes(c *v1.Container) []kindOfProbe {
	return []kindOfProbe{{"startup", "startupProbe", c.StartupProbe}, {"readiness", "readinessProbe", c.ReadinessProbe}, {"liveness", "livenessProbe", c.LivenessProbe}}
}

func containerHooks(c *v1.Container) []kindOfHook {
	if c.Lifecycle == nil {
		return nil
	}
	return []kindOfHook{{"post", "lifecycle.postStart", c.Lifecycle.PostStart}, {"pre", "lifecycle.preStop", c.Lifecycle.PreStop}}
}

// newProbeScript makes the script of a pod's probes, and of those of its hooks
// that are no program; nil where it has none.
func newProbeScript(pod *v1.Pod, dir string) (*probeScript, error) {
	s := &probeScript{
		Namespace: pod.Namespace, Name: pod.Name, UID: string(pod.UID), Dir: dir, Second: 100,
		ProbeAgent: userAgent("probe"),
	}
	for i, c := range allContainers(pod) {
		for _, p := range containerProbes(c) {
			if p.Probe == nil {
				continue
			}
			// The API server's defaults (SetDefaults_Probe in pkg/apis/core/v1).
			sp := scriptProbe{
				Container: c.Name, Number: i + 1, Kind: p.Kind, Grace: max(0, gracePeriod(pod)), Late: quote(""),
				Delay: p.InitialDelaySeconds, Period: or(p.PeriodSeconds, 10), Timeout: or(p.TimeoutSeconds, 1),
				Success: or(p.SuccessThreshold, 1), Failure: or(p.FailureThreshold, 3),
			}
			if g := p.TerminationGracePeriodSeconds; g != nil {
				sp.Grace = min(*g, longestGrace)
			}
			var err error
			if sp.Check, err = checkArgv(c, p.ProbeHandler, "probe"); err != nil {
				return nil, refuse("UnsupportedField", "container %s: %s: %v", c.Name, p.Field, err)
			}
			if p.Exec != nil {
				argv := staticCommand(c, p.Exec.Command)
				sp.Late = quote(fmt.Sprintf("command timed out: %q timed out after %ds", strings.Join(argv, " "), sp.Timeout))
			}
			s.Probes = append(s.Probes, sp)
		}
		for _, h := range containerHooks(c) {
			if h.LifecycleHandler == nil || h.HTTPGet == nil && h.TCPSocket == nil {
				continue
			}
			hook := scriptProbe{Container: c.Name, Number: i + 1, Kind: h.Kind, Check: []word{"invalid"}}
			if h.HTTPGet != nil {
				var err error
				if hook.Check, err = checkArgv(c, v1.ProbeHandler{HTTPGet: h.HTTPGet}, "lifecycle"); err != nil {
					return nil, refuse("UnsupportedField", "container %s: %s: %v", c.Name, h.Field, err)
				}
			}
			s.Hooks = append(s.Hooks, hook)
		}
	}
	if len(s.Probes)+len(s.Hooks) == 0 {
		return nil, nil
	}
	return s, nil
}

// render is the text of run/probe.sh.
func (s *probeScript) render() (string, error) {
	text, err := render("probe.sh.tmpl", s)
	if err != nil {
		return "", err
	}
	return text, checkText("the script of the pod's probes", text)
}

func or(n, otherwise int32) int32 {
	if n > 0 {
		return n
	}
	return otherwise
}

// userAgent is what the kubelet calls itself in probes and hooks.
func userAgent(purpose string) string {
	v := strings.Split(strings.TrimPrefix(kubernetesVersion, "v"), ".")
	return "kube-" + purpose + "/" + v[0] + "." + v[1]
}

// checkArgv is the call of one of the functions of probe.sh.tmpl.
func checkArgv(c *v1.Container, h v1.ProbeHandler, purpose string) ([]word, error) {
	switch {
	case h.Exec != nil:
		argv := []word{"inside"}
		for _, arg := range staticCommand(c, h.Exec.Command) {
			argv = append(argv, quote(arg))
		}
		return argv, nil
	case h.HTTPGet != nil:
		return httpArgv(c, h.HTTPGet, purpose)
	case h.TCPSocket != nil:
		port, err := containerPort(c, h.TCPSocket.Port)
		if err != nil {
			return nil, err
		}
		if err := checkHost(h.TCPSocket.Host); err != nil {
			return nil, err
		}
		return []word{"tcp", quote(h.TCPSocket.Host), number(port)}, nil
	case h.GRPC != nil:
		port, err := containerPort(c, intstr.FromInt32(h.GRPC.Port))
		if err != nil {
			return nil, err
		}
		scheme := "http"
		switch m := h.GRPC.Mode; {
		case m == nil || *m == v1.GRPCProbeModePlaintext:
		case *m == v1.GRPCProbeModeTLS:
			scheme = "https"
		default:
			return nil, fmt.Errorf("grpc.mode: %q is not supported; use Plaintext or TLS", *m)
		}
		service := ""
		if h.GRPC.Service != nil {
			service = *h.GRPC.Service
		}
		return []word{"grpc", quote(scheme), number(port), quote(octal(healthRequest(service)))}, nil
	}
	return nil, fmt.Errorf("it has no handler; give it exec, httpGet, tcpSocket or grpc")
}

func number(n int) word { return quote(strconv.Itoa(n)) }

// staticCommand expands $(VAR) as the kubelet does for probes: by the values
// that stand in the container's env, a value from elsewhere being empty
// (ExpandContainerCommandOnlyStatic in pkg/kubelet/container/helpers.go).
func staticCommand(c *v1.Container, command []string) []string {
	env := map[string]string{}
	for _, e := range c.Env {
		env[e.Name] = e.Value
	}
	var argv []string
	for _, arg := range command {
		var b strings.Builder
		for _, p := range expand(arg, func(name string) ([]valuePart, bool) {
			value, ok := env[name]
			return []valuePart{{Text: value}}, ok
		}) {
			b.WriteString(p.Text)
		}
		argv = append(argv, b.String())
	}
	return argv
}

// containerPort is a port by its number, or by its name among those that the
// container declares.
func containerPort(c *v1.Container, port intstr.IntOrString) (int, error) {
	n := port.IntValue()
	if port.Type == intstr.String {
		for _, p := range c.Ports {
			if p.Name == port.StrVal {
				n = int(p.ContainerPort)
			}
		}
	}
	if n < 1 || n > 65535 {
		return 0, fmt.Errorf("port: %q is neither the name of a port of the container nor a number from 1 to 65535", port.String())
	}
	return n, nil
}

// hostText are names and addresses that are nothing else in a URL.
var hostText = regexp.MustCompile(`^[A-Za-z0-9._:-]*$`)

func checkHost(host string) error {
	if !hostText.MatchString(host) {
		return fmt.Errorf("host: %q is neither a host's name nor an address", host)
	}
	return nil
}

// httpArgv are the arguments of http in probe.sh.tmpl. The request is the one
// that the kubelet makes (pkg/probe/http/request.go), as curl is told of it in a
// configuration file.
func httpArgv(c *v1.Container, get *v1.HTTPGetAction, purpose string) ([]word, error) {
	scheme := strings.ToLower(string(get.Scheme))
	switch scheme {
	case "":
		scheme = "http"
	case "http", "https":
	default:
		return nil, fmt.Errorf("httpGet.scheme: %q is not supported; use HTTP or HTTPS", get.Scheme)
	}
	port, err := containerPort(c, get.Port)
	if err != nil {
		return nil, err
	}
	if err := checkHost(get.Host); err != nil {
		return nil, err
	}
	var config strings.Builder
	line := func(key, value string) {
		fmt.Fprintf(&config, "%s = \"%s\"\n", key, strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\t", `\t`).Replace(value))
	}
	header := func(name, value string) {
		if value == "" {
			line("header", name+";") // curl's word for a header without a value
		} else {
			line("header", name+": "+value)
		}
	}
	switch p := get.Protocol; {
	case p == nil || *p == v1.HTTPProtocolHTTP1:
		if scheme == "http" {
			line("header", "Connection: close")
		}
	case *p == v1.HTTPProtocolHTTP2:
		config.WriteString("http2-prior-knowledge\n")
	default:
		return nil, fmt.Errorf("httpGet.protocol: %q is not supported; use HTTP1 or HTTP2", *p)
	}
	headers := http.Header{}
	for _, h := range get.HTTPHeaders {
		name := http.CanonicalHeaderKey(h.Name)
		if len(validation.IsHTTPHeaderName(name)) > 0 || strings.ContainsFunc(h.Value, func(r rune) bool { return r < ' ' && r != '\t' || r == 0x7f }) {
			return nil, fmt.Errorf("httpGet.httpHeaders: %q has a name or a value that no header can have", h.Name)
		}
		switch name {
		case "Content-Length", "Transfer-Encoding", "Trailer": // Go's client sends its own
		case "Host", "User-Agent", "Accept": // it sends one of each, and none that is empty
			if _, ok := headers[name]; ok {
				continue
			}
			headers[name] = nil
			switch {
			case h.Value != "":
				header(name, h.Value)
			case name != "Host":
				line("header", name+":") // curl's word for not sending its own
			}
		default:
			header(name, h.Value)
		}
	}
	if _, ok := headers["User-Agent"]; !ok {
		header("User-Agent", userAgent(purpose))
	}
	if _, ok := headers["Accept"]; !ok {
		header("Accept", "*/*")
	}
	return []word{"http", quote(scheme), quote(get.Host), number(port), quote(requestTarget(get.Path)), quote(config.String())}, nil
}

// requestTarget is the path with its query as it goes over the line, in
// characters that mean nothing to curl.
func requestTarget(path string) string {
	u, err := url.Parse(path)
	if err != nil {
		u = &url.URL{Path: path}
	}
	u.Scheme, u.Host, u.User = "http", "h", nil
	if again, err := url.Parse(u.String()); err == nil { // with the slash that was missing
		u = again
	}
	var b strings.Builder
	for _, c := range []byte("/" + strings.TrimPrefix(u.RequestURI(), "/")) {
		if c <= ' ' || c >= 0x7f || c == '"' || c == '\\' {
			fmt.Fprintf(&b, "%%%02X", c)
		} else {
			b.WriteByte(c)
		}
	}
	return b.String()
}

// healthRequest is a message of gRPC's framing that holds a HealthCheckRequest:
// not compressed, its length, field 1 with the service's name.
func healthRequest(service string) []byte {
	var message []byte
	if service != "" {
		message = append(binary.AppendUvarint([]byte{0x0a}, uint64(len(service))), service...)
	}
	return append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(message))), message...)
}

// octal is a format with which printf writes these bytes.
func octal(data []byte) string {
	var b strings.Builder
	for _, c := range data {
		fmt.Fprintf(&b, `\%03o`, c)
	}
	return b.String()
}

// probes checks the probes and hooks of a container that no rule refuses.
func (k *checker) probes(pod *v1.Pod) {
	for _, c := range allContainers(pod) {
		for _, p := range containerProbes(c) {
			if p.Probe != nil {
				k.handler(c, p.Field, p.ProbeHandler)
			}
		}
		for _, h := range containerHooks(c) {
			if h.LifecycleHandler != nil && h.HTTPGet != nil {
				k.handler(c, h.Field, v1.ProbeHandler{HTTPGet: h.HTTPGet})
			}
		}
	}
}

func (k *checker) handler(c *v1.Container, field string, h v1.ProbeHandler) {
	if _, err := checkArgv(c, h, "probe"); err != nil {
		k.refuse("InvalidPod", "container %s: %s: %v", c.Name, field, err)
	}
}
