package knoc

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func service(namespace, name, ip string, ports ...v1.ServicePort) v1.Service {
	return v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Spec: v1.ServiceSpec{ClusterIP: ip, Ports: ports}}
}

// The expectations are what the kubelet's envvars package gives.
func TestServiceEnv(t *testing.T) {
	external := service("ns", "external", "10.0.0.9", v1.ServicePort{Port: 1})
	external.Spec.Type = v1.ServiceTypeExternalName
	got := showEnv(serviceEnv([]v1.Service{
		service("ns", "my-db", "10.0.0.1", v1.ServicePort{Port: 5432}, v1.ServicePort{Port: 53, Protocol: v1.ProtocolUDP, Name: "u-p"}),
		service("ns", "six", "fd00::1", v1.ServicePort{Port: 80, Protocol: v1.ProtocolTCP}),
		service("ns", "headless", "None", v1.ServicePort{Port: 80}),
		service("ns", "waiting", "", v1.ServicePort{Port: 80}),
		external,
	}).vars)
	if diff := cmp.Diff(strings.Split(`MY_DB_SERVICE_HOST=10.0.0.1
MY_DB_SERVICE_PORT=5432
MY_DB_SERVICE_PORT_U_P=53
MY_DB_PORT=tcp://10.0.0.1:5432
MY_DB_PORT_5432_TCP=tcp://10.0.0.1:5432
MY_DB_PORT_5432_TCP_PROTO=tcp
MY_DB_PORT_5432_TCP_PORT=5432
MY_DB_PORT_5432_TCP_ADDR=10.0.0.1
MY_DB_PORT_53_UDP=udp://10.0.0.1:53
MY_DB_PORT_53_UDP_PROTO=udp
MY_DB_PORT_53_UDP_PORT=53
MY_DB_PORT_53_UDP_ADDR=10.0.0.1
SIX_SERVICE_HOST=fd00::1
SIX_SERVICE_PORT=80
SIX_PORT=tcp://[fd00::1]:80
SIX_PORT_80_TCP=tcp://[fd00::1]:80
SIX_PORT_80_TCP_PROTO=tcp
SIX_PORT_80_TCP_PORT=80
SIX_PORT_80_TCP_ADDR=fd00::1`, "\n"), got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestPodServices(t *testing.T) {
	objs := envObjects()
	objs.services = []v1.Service{
		service("default", "kubernetes", "10.96.0.1", v1.ServicePort{Name: "https", Port: 443}),
		service("default", "other", "10.96.0.2", v1.ServicePort{Port: 1}),
		service("ns", "db", "10.96.0.3", v1.ServicePort{Port: 2}),
	}
	no := false
	for _, tc := range []struct {
		name, namespace, api string
		links                *bool
		want                 string
	}{
		{"of its namespace", "ns", "", nil, "db=10.96.0.3:2 kubernetes=10.96.0.1:443"},
		{"not wanted", "ns", "", &no, "kubernetes=10.96.0.1:443"},
		{"the API server's namespace", "default", "", nil, "kubernetes=10.96.0.1:443 other=10.96.0.2:1"},
		{"another address", "ns", "api.example.org", nil, "db=10.96.0.3:2 kubernetes=api.example.org:443"},
		{"another address and port, not wanted", "default", "[fd00::1]:6443", &no, "kubernetes=fd00::1:6443"},
		{"another address in its namespace", "default", "10.1.2.3:6443", nil, "kubernetes=10.1.2.3:6443 other=10.96.0.2:1"},
	} {
		p := &KNOCProvider{objs: objs, cfg: Config{APIServerForPods: tc.api}}
		pod := testPod()
		pod.Namespace, pod.Spec.EnableServiceLinks = tc.namespace, tc.links
		list, sentence, err := p.podServices(t.Context(), pod)
		if err != nil || sentence != "" {
			t.Fatal(tc.name, err, sentence)
		}
		env := serviceEnv(list)
		var got []string
		for _, v := range env.vars {
			if name, ok := strings.CutSuffix(v.Name, "_SERVICE_HOST"); ok {
				port, _ := env.lookup(name + "_SERVICE_PORT")
				got = append(got, strings.ToLower(name)+"="+showParts(v.Value)+":"+showParts(port))
			}
		}
		slices.Sort(got)
		if text := strings.Join(got, " "); text != tc.want {
			t.Errorf("%s: %s, want %s", tc.name, text, tc.want)
		}
	}

	p := &KNOCProvider{objs: objs}
	objs.noServices = apierrors.NewForbidden(v1.Resource("services"), "", errors.New("no"))
	if list, sentence, err := p.podServices(t.Context(), testPod()); list != nil || err != nil || !strings.Contains(sentence, "forbidden") {
		t.Errorf("without the right: %v %q %v", list, sentence, err)
	}
	objs.noServices = errors.New("dial tcp: connection refused")
	_, _, err := p.podServices(t.Context(), testPod())
	checkError(t, err, "CreateContainerConfigError: dial tcp: connection refused", true)

	for _, address := range []string{"https://x", "a/b", "x:0", "x:99999", ":443", "x y", ""} {
		if s, err := apiServerForPods(address); err == nil {
			t.Errorf("--api-server-for-pods %q was taken: %v", address, s.Spec)
		}
	}
}

// The pod's own variables come before those of services, and may refer to them.
func TestStageEnvServices(t *testing.T) {
	facts := nodeFacts{Services: []v1.Service{service("ns", "db", "10.96.0.3", v1.ServicePort{Port: 2})}}
	c := testContainer(t, `{envFrom: [{configMapRef: {name: cm2}}], env: [{name: DB_PORT, value: mine}, {name: URL, value: "$(DB_SERVICE_HOST):$(DB_PORT)"}]}`)
	vars, err := stageEnv(t.Context(), testPod(), c, envObjects(), facts)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"A=from cm2", "C=$(B)", "DB_PORT=mine", "URL=10.96.0.3:mine", "DB_SERVICE_HOST=10.96.0.3", "DB_SERVICE_PORT=2",
		"DB_PORT_2_TCP=tcp://10.96.0.3:2", "DB_PORT_2_TCP_PROTO=tcp", "DB_PORT_2_TCP_PORT=2", "DB_PORT_2_TCP_ADDR=10.96.0.3"}, showEnv(vars)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
