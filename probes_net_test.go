package knoc

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

func handler(h v1.ProbeHandler) v1.Container {
	return with(func(c *v1.Container) { c.ReadinessProbe = &v1.Probe{ProbeHandler: h} })
}

func TestProbeWithoutCurl(t *testing.T) {
	t.Parallel()
	port := intstr.FromInt32(80)
	host, _ := os.Hostname()
	eachShell(t, func(t *testing.T, shell []string) {
		for _, h := range []v1.ProbeHandler{
			{HTTPGet: &v1.HTTPGetAction{Port: port}}, {TCPSocket: &v1.TCPSocketAction{Port: port}}, {GRPC: &v1.GRPCAction{Port: 80}},
		} {
			r := newProbeRun(t, shell, handler(h), 100, false)
			rc, text := r.once("--once", "a", "0", "readiness")
			if want := "curl is not installed on the compute node " + host + ": "; rc != 1 || !strings.HasPrefix(text, want) {
				t.Errorf("%v: exit code %d, %q", h, rc, text)
			}
		}
	})
}

func TestProbeHTTP(t *testing.T) {
	t.Parallel()
	needCurl(t)
	elsewhere := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { t.Error("a redirect led to another host") }))
	t.Cleanup(elsewhere.Close)
	mux := http.NewServeMux()
	mux.HandleFunc("/code/{code}", func(w http.ResponseWriter, r *http.Request) {
		code, _ := strconv.Atoi(r.PathValue("code"))
		w.WriteHeader(code)
		io.WriteString(w, "secret body\n")
	})
	mux.HandleFunc("/request", func(w http.ResponseWriter, r *http.Request) {
		want := "GET /request?a=%22b%22&c Host=example.org:1 UA=kube-probe/1.37 Accept=*/* X=[a \"b\" \\ 'c' $(id) second] Empty=[] Auth=Basic x"
		got := fmt.Sprintf("%s %s Host=%s UA=%s Accept=%s X=%s Empty=%q Auth=%s", r.Method, r.RequestURI, r.Host, r.UserAgent(), r.Header.Get("Accept"), r.Header["X-Some"], r.Header["X-Empty"], r.Header.Get("Authorization"))
		if want = strings.Replace(want, "Empty=[]", `Empty=[""]`, 1); got != want {
			t.Errorf("request %s\nwant    %s", got, want)
		}
	})
	mux.HandleFunc("/none", func(w http.ResponseWriter, r *http.Request) {
		if len(r.Header["User-Agent"])+len(r.Header["Accept"]) > 0 {
			t.Errorf("headers %v", r.Header)
		}
	})
	mux.HandleFunc("/to", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Location", r.URL.Query().Get("u"))
		w.WriteHeader(302)
	})
	mux.HandleFunc("/loop", func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/loop", http.StatusFound) })
	mux.HandleFunc("/304", func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(304) })
	mux.HandleFunc("/big", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Length", "100000000")
		w.Write(make([]byte, 20000))
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	})
	mux.HandleFunc("/endless", func(w http.ResponseWriter, r *http.Request) {
		for r.Context().Err() == nil {
			w.Write(make([]byte, 10000))
		}
	})
	mux.HandleFunc("/hang", func(w http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	mux.HandleFunc("/trickle", func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(200)
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	})
	plain, tls := httptest.NewServer(mux), httptest.NewTLSServer(mux)
	t.Cleanup(plain.Close)
	t.Cleanup(tls.Close)
	h2c := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.ProtoMajor != 2 {
			w.WriteHeader(505)
		}
	}))
	h2c.Config.Protocols = new(http.Protocols)
	h2c.Config.Protocols.SetUnencryptedHTTP2(true)
	h2c.Start()
	t.Cleanup(h2c.Close)
	port := func(s *httptest.Server) int32 {
		return int32(s.Listener.Addr().(*net.TCPAddr).Port)
	}
	http2 := v1.HTTPProtocolHTTP2
	base := "http://127.0.0.1:" + fmt.Sprint(port(plain))
	const late = "context deadline exceeded (Client.Timeout exceeded while awaiting headers)"
	tests := []struct {
		name string
		get  v1.HTTPGetAction
		rc   int
		text string
	}{
		{"200", v1.HTTPGetAction{Path: "/code/200"}, 0, ""},
		{"204", v1.HTTPGetAction{Path: "/code/204"}, 0, ""},
		{"399", v1.HTTPGetAction{Path: "/code/399"}, 2, "Probe terminated redirects, Location: "},
		{"304", v1.HTTPGetAction{Path: "/304"}, 2, "Probe terminated redirects, Location: "},
		{"400", v1.HTTPGetAction{Path: "/code/400"}, 1, "HTTP probe failed with statuscode: 400"},
		{"503", v1.HTTPGetAction{Path: "/code/503"}, 1, "HTTP probe failed with statuscode: 503"},
		{"named host", v1.HTTPGetAction{Path: "/code/200", Host: "localhost"}, 0, ""},
		{"https", v1.HTTPGetAction{Path: "/code/200", Scheme: v1.URISchemeHTTPS, Port: intstr.FromInt32(port(tls))}, 0, ""},
		{"https 500", v1.HTTPGetAction{Path: "/code/500", Scheme: v1.URISchemeHTTPS, Port: intstr.FromInt32(port(tls))}, 1, "HTTP probe failed with statuscode: 500"},
		{"h2c", v1.HTTPGetAction{Protocol: &http2, Port: intstr.FromInt32(port(h2c))}, 0, ""},
		{"request", v1.HTTPGetAction{Path: `/request?a="b"&c#d`, HTTPHeaders: []v1.HTTPHeader{
			{Name: "host", Value: "example.org:1"}, {Name: "x-some", Value: `a "b" \ 'c' $(id)`}, {Name: "X-Some", Value: "second"}, {Name: "x-empty"}, {Name: "authorization", Value: "Basic x"}, {Name: "content-length", Value: "5"},
		}}, 0, ""},
		{"no headers", v1.HTTPGetAction{Path: "/none", HTTPHeaders: []v1.HTTPHeader{{Name: "accept"}, {Name: "user-agent"}}}, 0, ""},
		{"redirect", v1.HTTPGetAction{Path: "/to?u=/code/200"}, 0, ""},
		{"redirect to a failure", v1.HTTPGetAction{Path: "/to?u=code/500"}, 1, "HTTP probe failed with statuscode: 500"},
		{"redirect to another port", v1.HTTPGetAction{Path: "/to?u=https://127.0.0.1:" + fmt.Sprint(port(tls)) + "/code/404"}, 1, "HTTP probe failed with statuscode: 404"},
		{"redirect to another host", v1.HTTPGetAction{Path: "/to?u=" + strings.Replace(elsewhere.URL, "127.0.0.1", "localhost", 1)}, 2, "Probe terminated redirects, Location: http://localhost:" + fmt.Sprint(port(elsewhere)) + "/"},
		{"redirect to a file", v1.HTTPGetAction{Path: "/to?u=file:///etc/passwd"}, 2, "Probe terminated redirects, Location: file:///etc/passwd"},
		{"redirect with quotes", v1.HTTPGetAction{Path: "/to?u=/%22%0a%5c"}, 1, ""},
		{"loop", v1.HTTPGetAction{Path: "/loop"}, 1, `Get "` + base + `/loop": stopped after 10 redirects`},
		{"big", v1.HTTPGetAction{Path: "/big"}, 0, ""},
		{"endless", v1.HTTPGetAction{Path: "/endless"}, 0, ""},
		{"hang", v1.HTTPGetAction{Path: "/hang"}, 1, `Get "` + base + `/hang": ` + late},
		{"trickle", v1.HTTPGetAction{Path: "/trickle"}, 1, `Get "` + base + `/trickle": ` + late},
		{"refused", v1.HTTPGetAction{Port: intstr.FromInt32(1)}, 1, `Get "http://127.0.0.1:1/": dial tcp 127.0.0.1:1: connect: connection refused`},
		{"unknown host", v1.HTTPGetAction{Host: "no-such-host.invalid"}, 1, `Get "http://no-such-host.invalid:` + fmt.Sprint(port(plain)) + `/": Could not resolve host: no-such-host.invalid`},
		{"tls expected", v1.HTTPGetAction{Scheme: v1.URISchemeHTTPS, Path: "/code/200"}, 1, ""},
	}
	eachShell(t, func(t *testing.T, shell []string) {
		for _, tc := range tests {
			if tc.get.Port.IntValue() == 0 {
				tc.get.Port = intstr.FromInt32(port(plain))
			}
			c := handler(v1.ProbeHandler{HTTPGet: &tc.get})
			if c.ReadinessProbe.TimeoutSeconds = 20; slices.Contains([]string{"endless", "hang", "trickle"}, tc.name) {
				c.ReadinessProbe.TimeoutSeconds = 1
			}
			r := newProbeRun(t, shell, c, 100, true)
			rc, text := r.once("--once", "a", "0", "readiness")
			if text = strings.TrimSuffix(text, "\n"); rc != tc.rc || tc.text != "" && text != tc.text || strings.Contains(text, "body") {
				t.Errorf("%s: exit code %d, want %d; %q, want %q", tc.name, rc, tc.rc, text, tc.text)
			}
		}
	})
}

// A redirect to another host is a success with a warning, once in a while.
func TestProbeWarning(t *testing.T) {
	t.Parallel()
	needCurl(t)
	s := httptest.NewServer(http.RedirectHandler("http://elsewhere.invalid/", http.StatusFound))
	t.Cleanup(s.Close)
	eachShell(t, func(t *testing.T, shell []string) {
		c := handler(v1.ProbeHandler{HTTPGet: &v1.HTTPGetAction{Port: intstr.FromInt(s.Listener.Addr().(*net.TCPAddr).Port)}})
		quick(c.ReadinessProbe)
		r := newProbeRun(t, shell, c, 20, true)
		r.begin()
		r.await("ready a 0 1")
		for since := time.Now(); strings.Count(r.read("journal.0"), "unhealthy") < 3 && time.Since(since) < 30*time.Second; {
			time.Sleep(10 * time.Millisecond)
		}
		time.Sleep(time.Second)
		if diff := cmp.Diff([]string{"unhealthy a 0 readiness 0", "ready a 0 1", "unhealthy a 0 readiness 0", "unhealthy a 0 readiness 0"}, r.stop()); diff != "" {
			t.Errorf("journal (-want +got):\n%s", diff)
		}
		if got := r.read("msg/a.0.readiness"); got != "Probe terminated redirects, Location: http://elsewhere.invalid/\n" {
			t.Errorf("the message is %q", got)
		}
	})
}

func TestProbeTCP(t *testing.T) {
	t.Parallel()
	needCurl(t)
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { silent.Close() })
	got := make(chan string, 100)
	go func() {
		for {
			c, err := silent.Accept()
			if err != nil {
				return
			}
			data, _ := io.ReadAll(c)
			c.Close()
			got <- string(data)
		}
	}()
	silentServer := handler(v1.ProbeHandler{TCPSocket: &v1.TCPSocketAction{Port: intstr.FromInt(silent.Addr().(*net.TCPAddr).Port)}})
	silentServer.ReadinessProbe.TimeoutSeconds = 20
	eachShell(t, func(t *testing.T, shell []string) {
		r := newProbeRun(t, shell, silentServer, 100, true)
		began := time.Now()
		if rc, text := r.once("--once", "a", "0", "readiness"); rc != 0 {
			t.Errorf("exit code %d, %q", rc, text)
		}
		if took := time.Since(began); took > 15*time.Second {
			t.Errorf("it took %v with a server that says nothing", took)
		}
		if data := <-got; data != "" {
			t.Errorf("the probe sent %q", data)
		}
		r = newProbeRun(t, shell, handler(v1.ProbeHandler{TCPSocket: &v1.TCPSocketAction{Port: intstr.FromInt32(1)}}), 100, true)
		if rc, text := r.once("--once", "a", "0", "readiness"); rc != 1 || text != "dial tcp 127.0.0.1:1: connect: connection refused\n" {
			t.Errorf("exit code %d, %q", rc, text)
		}
	})
}

func TestProbeGRPC(t *testing.T) {
	t.Parallel()
	needCurl(t)
	answers := func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		service := ""
		if len(body) > 7 {
			service = string(body[7:])
		}
		if r.URL.Path != "/grpc.health.v1.Health/Check" || r.Header.Get("Content-Type") != "application/grpc" || r.Header.Get("Te") != "trailers" ||
			r.UserAgent() != "kube-probe/1.37" || !bytes.Equal(body, healthRequest(service)) {
			t.Errorf("%s %v %q", r.URL.Path, r.Header, body)
		}
		w.Header().Set("Content-Type", "application/grpc")
		answer := func(message ...byte) {
			w.Header().Set("Trailer", "Grpc-Status")
			w.WriteHeader(200)
			w.(http.Flusher).Flush()
			w.Write(append([]byte{0, 0, 0, 0, byte(len(message))}, message...))
			w.Header().Set("Grpc-Status", "0")
		}
		switch service {
		case "":
			answer(8, 1)
		case "down":
			answer(8, 2)
		case "unknown":
			answer()
		case "cut":
			w.WriteHeader(200)
			w.(http.Flusher).Flush()
			w.Write([]byte{0, 0, 0, 0, 2, 8, 1})
		case "hang":
			<-r.Context().Done()
		case "old":
			w.Header().Set("Grpc-Status", "12")
			w.Header().Set("Grpc-Message", "unknown service grpc.health.v1.Health")
		default:
			w.Header().Set("Grpc-Status", "5")
			w.Header().Set("Grpc-Message", "unknown service")
		}
	}
	serve := func(tls bool) int32 {
		s := httptest.NewUnstartedServer(http.HandlerFunc(answers))
		s.Config.Protocols = new(http.Protocols)
		s.Config.Protocols.SetUnencryptedHTTP2(!tls)
		s.Config.Protocols.SetHTTP2(tls)
		if s.EnableHTTP2 = tls; tls {
			s.StartTLS()
		} else {
			s.Start()
		}
		t.Cleanup(s.Close)
		return int32(s.Listener.Addr().(*net.TCPAddr).Port)
	}
	plain, secure := serve(false), serve(true)
	http1 := httptest.NewServer(http.NotFoundHandler())
	t.Cleanup(http1.Close)
	mode := v1.GRPCProbeModeTLS
	eachShell(t, func(t *testing.T, shell []string) {
		for _, tc := range []struct {
			service string
			port    int32
			mode    *v1.GRPCProbeMode
			rc      int
			text    string
		}{
			{"", plain, nil, 0, ""},
			{"", secure, &mode, 0, ""},
			{"down", plain, nil, 1, `service unhealthy (responded with "NOT_SERVING")`},
			{"down", secure, &mode, 1, `service unhealthy (responded with "NOT_SERVING")`},
			{"unknown", plain, nil, 1, `service unhealthy (responded with "UNKNOWN")`},
			{"cut", plain, nil, 1, "error: health rpc probe failed: the answer is not one of gRPC"},
			{"hang", plain, nil, 1, "timeout: health rpc did not complete within 1s"},
			{"old", plain, nil, 1, "error: this server does not implement the grpc health protocol (grpc.health.v1.Health): unknown service grpc.health.v1.Health"},
			{"it's \\ %s é", plain, nil, 1, "error: health rpc probe failed: rpc error: code = NotFound desc = unknown service"},
			{"", 1, nil, 1, `error: failed to connect service at "127.0.0.1:1": connection refused`},
			{"", int32(http1.Listener.Addr().(*net.TCPAddr).Port), nil, 1, ""},
		} {
			c := handler(v1.ProbeHandler{GRPC: &v1.GRPCAction{Port: tc.port, Service: &tc.service, Mode: tc.mode}})
			if c.ReadinessProbe.TimeoutSeconds = 20; tc.service == "hang" {
				c.ReadinessProbe.TimeoutSeconds = 1
			}
			r := newProbeRun(t, shell, c, 100, true)
			rc, text := r.once("--once", "a", "0", "readiness")
			if text = strings.TrimSuffix(text, "\n"); rc != tc.rc || text != tc.text && (rc == 0 || tc.text != "") {
				t.Errorf("%s: exit code %d, want %d; %q, want %q", tc.service, rc, tc.rc, text, tc.text)
			}
		}
	})
}

func TestHTTPHook(t *testing.T) {
	t.Parallel()
	needCurl(t)
	var agent string
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		agent = r.UserAgent()
		time.Sleep(100 * time.Millisecond)
		w.WriteHeader(500) // any answer will do
	}))
	defer s.Close()
	c := with(func(c *v1.Container) {
		c.Lifecycle = &v1.Lifecycle{
			PostStart: &v1.LifecycleHandler{HTTPGet: &v1.HTTPGetAction{Port: intstr.FromInt(s.Listener.Addr().(*net.TCPAddr).Port), Path: "/hook"}},
			PreStop:   &v1.LifecycleHandler{HTTPGet: &v1.HTTPGetAction{Port: intstr.FromInt32(1)}},
		}
	})
	for _, shell := range testShells(t) {
		r := newProbeRun(t, shell, c, 100, true)
		if rc, text := r.once("--hook", "a", "post"); rc != 0 || text != "" || agent != "kube-lifecycle/1.37" {
			t.Errorf("postStart: exit code %d, %q, agent %q", rc, text, agent)
		}
		if rc, text := r.once("--hook", "a", "pre"); rc != 1 || text != "Get \"http://127.0.0.1:1/\": dial tcp 127.0.0.1:1: connect: connection refused\n" {
			t.Errorf("preStop: exit code %d, %q", rc, text)
		}
		old := c.DeepCopy()
		old.Lifecycle.PreStop = &v1.LifecycleHandler{TCPSocket: &v1.TCPSocketAction{Port: intstr.FromInt32(1)}}
		r = newProbeRun(t, shell, *old, 100, true)
		if rc, text := r.once("--hook", "a", "pre"); rc != 1 || text != "Cannot run handler: invalid handler\n" {
			t.Errorf("tcpSocket: exit code %d, %q", rc, text)
		}
	}
}
