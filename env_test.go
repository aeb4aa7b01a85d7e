package knoc

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/yaml"
)

// fakeObjects are the objects of one namespace, "ns".
type fakeObjects struct {
	configMaps map[string]*v1.ConfigMap
	secrets    map[string]*v1.Secret
	services   []v1.Service
	// serial ends a token, to be renewed at renew.
	serial string
	renew  time.Time
	// noServices is what reading them answers, when set.
	noServices error
	// tokens are the requests seen, as "audience/seconds".
	tokens []string
	reads  int
	// broken is what every read answers, when set.
	broken error
}

func (f *fakeObjects) ConfigMap(_ context.Context, namespace, name string) (*v1.ConfigMap, error) {
	f.reads++
	if f.broken != nil {
		return nil, f.broken
	}
	if cm := f.configMaps[name]; cm != nil && namespace == "ns" {
		return cm, nil
	}
	return nil, apierrors.NewNotFound(schema.GroupResource{Resource: "configmaps"}, name)
}

func (f *fakeObjects) Secret(_ context.Context, namespace, name string) (*v1.Secret, error) {
	f.reads++
	if f.broken != nil {
		return nil, f.broken
	}
	if s := f.secrets[name]; s != nil && namespace == "ns" {
		return s, nil
	}
	return nil, apierrors.NewNotFound(schema.GroupResource{Resource: "secrets"}, name)
}

func (f *fakeObjects) Services(_ context.Context, namespace, name string) ([]v1.Service, error) {
	if f.noServices != nil {
		return nil, f.noServices
	}
	var list []v1.Service
	for _, s := range f.services {
		if s.Namespace == namespace && (name == "" || s.Name == name) {
			list = append(list, s)
		}
	}
	return list, nil
}

func (f *fakeObjects) Token(_ context.Context, pod *v1.Pod, audience string, seconds int64) (string, time.Time, error) {
	if f.broken != nil {
		return "", time.Time{}, f.broken
	}
	if pod.Spec.ServiceAccountName == "gone" {
		return "", time.Time{}, apierrors.NewNotFound(schema.GroupResource{Resource: "serviceaccounts"}, "gone")
	}
	f.tokens = append(f.tokens, fmt.Sprintf("%s/%d", audience, seconds))
	return fmt.Sprintf("token-for-%s%s", audience, f.serial), f.renew, nil
}

// envObjects are what the environment tests read.
func envObjects() *fakeObjects {
	return &fakeObjects{
		configMaps: map[string]*v1.ConfigMap{
			"cm": {
				Data:       map[string]string{"A": "from cm", "B": "b", "MULTI": "one\ntwo\n"},
				BinaryData: map[string][]byte{"BIN": {1, 2}},
			},
			"cm2":    {Data: map[string]string{"A": "from cm2", "C": "$(B)"}},
			"dotted": {Data: map[string]string{"app.properties": "x"}},
			"empty":  {},
		},
		secrets: map[string]*v1.Secret{
			"s":   {Data: map[string][]byte{"PASSWORD": []byte("p'$(B)\x7f"), "EMPTY": {}}},
			"nul": {Data: map[string][]byte{"X": []byte("a\x00b")}},
			"bin": {Data: map[string][]byte{"X": []byte("a\xff")}},
		},
	}
}

func testPod() *v1.Pod {
	return &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "ns", Name: "web-0", UID: "11111111-2222-3333-4444-555555555555",
			Labels:      map[string]string{"app": "web", "tier/x.y": "a\"b\nc"},
			Annotations: map[string]string{"note": "näh", "a['b']c": "odd"},
		},
		Spec: v1.PodSpec{NodeName: "knoc", ServiceAccountName: "robot", Containers: []v1.Container{{Name: "c", Image: "busybox"}}},
	}
}

// testContainer reads a container from YAML without its name.
func testContainer(t *testing.T, text string) *v1.Container {
	t.Helper()
	var c v1.Container
	if err := yaml.UnmarshalStrict([]byte(text), &c); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	c.Name, c.Image = "c", "busybox"
	return &c
}

// showEnv writes variables as NAME=value with <VAR> for what the node knows and
// !text! for what is secret.
func showEnv(vars []envVar) []string {
	var lines []string
	for _, v := range vars {
		lines = append(lines, v.Name+"="+showParts(v.Value))
	}
	return lines
}

func showParts(parts []valuePart) string {
	var b strings.Builder
	for _, p := range parts {
		switch {
		case p.Var != "":
			b.WriteString("<" + p.Var + ">")
		case p.Secret:
			b.WriteString("!" + p.Text + "!")
		default:
			b.WriteString(p.Text)
		}
	}
	return b.String()
}

func TestStageEnv(t *testing.T) {
	long := strings.Repeat("0123456789", 10240)
	for _, tc := range []struct {
		name string
		spec string
		want []string
	}{
		{"none", `{}`, nil},
		{"value", `env: [{name: A, value: x}]`, []string{"A=x"}},
		{"empty value", `env: [{name: A}, {name: B, value: ""}]`, []string{"A=", "B="}},
		{"names that no shell can assign", `{envFrom: [{configMapRef: {name: dotted}}, {prefix: a-, secretRef: {name: s}}], env: [{name: " 3 ~", value: $(app.properties)}]}`, []string{"app.properties=x", "a-EMPTY=", "a-PASSWORD=!p'$(B)\x7f!", " 3 ~=x"}},
		{"home", `env: [{name: HOME, value: /data}]`, []string{"HOME=/data"}},
		{"order is kept", `env: [{name: B, value: "1"}, {name: A, value: "2"}]`, []string{"B=1", "A=2"}},
		{"last of a name wins", `env: [{name: A, value: "1"}, {name: B, value: $(A)}, {name: A, value: "2"}, {name: C, value: $(A)}]`, []string{"A=2", "B=1", "C=2"}},
		{"json", `env: [{name: A, value: '{"a": ["b\\n", "c,d"], "e": "\"f\""}'}]`, []string{`A={"a": ["b\\n", "c,d"], "e": "\"f\""}`}},
		{"spaces, tabs, newlines", `env: [{name: A, value: "  x\t\n y \n"}]`, []string{"A=  x\t\n y \n"}},
		{"shell's own", "env: [{name: A, value: '`id` $HOME ${HOME} \\ ; & | > < * ? # !'}]", []string{"A=`id` $HOME ${HOME} \\ ; & | > < * ? # !"}},
		{"command substitution is a reference to no variable", `env: [{name: A, value: $(id -u)}]`, []string{"A=$(id -u)"}},
		{"utf-8", `env: [{name: A, value: "né 日本 🐟"}]`, []string{"A=né 日本 🐟"}},
		{"100 KB", `env: [{name: A, value: "` + long + `"}]`, []string{"A=" + long}},
		{"reference", `env: [{name: A, value: x}, {name: B, value: 1$(A)2$(A)}]`, []string{"A=x", "B=1x2x"}},
		{"reference to a later one", `env: [{name: B, value: $(A)}, {name: A, value: x}]`, []string{"B=$(A)", "A=x"}},
		{"reference to itself", `env: [{name: A, value: x}, {name: A, value: $(A):y}]`, []string{"A=x:y"}},
		{"reference is not expanded twice", `env: [{name: A, value: x}, {name: B, value: $$(A)}, {name: C, value: $(B)}]`, []string{"A=x", "B=$(A)", "C=$(A)"}},
		{"reference through envFrom", `{envFrom: [{configMapRef: {name: cm2}}], env: [{name: B, value: z}, {name: D, value: "$(C) $(A)"}]}`, []string{"A=from cm2", "C=$(B)", "B=z", "D=$(B) from cm2"}},
		{"configMapKeyRef", `env: [{name: X, valueFrom: {configMapKeyRef: {name: cm, key: MULTI}}}]`, []string{"X=one\ntwo\n"}},
		{"configMapKeyRef optional key", `env: [{name: X, valueFrom: {configMapKeyRef: {name: cm, key: gone, optional: true}}}, {name: YY, value: yy}]`, []string{"YY=yy"}},
		{"configMapKeyRef optional object", `env: [{name: X, valueFrom: {configMapKeyRef: {name: gone, key: gone, optional: true}}}]`, nil},
		{"optional and absent leaves what envFrom gave", `{envFrom: [{configMapRef: {name: cm}}], env: [{name: A, valueFrom: {configMapKeyRef: {name: gone, key: gone, optional: true}}}]}`, []string{"A=from cm", "B=b", "MULTI=one\ntwo\n"}},
		{"secretKeyRef", `env: [{name: X, valueFrom: {secretKeyRef: {name: s, key: PASSWORD}}}]`, []string{"X=!p'$(B)\x7f!"}},
		{"secretKeyRef empty", `env: [{name: X, valueFrom: {secretKeyRef: {name: s, key: EMPTY}}}]`, []string{"X="}},
		{"secretKeyRef optional key", `env: [{name: X, valueFrom: {secretKeyRef: {name: s, key: gone, optional: true}}}]`, nil},
		{"secretKeyRef optional object", `env: [{name: X, valueFrom: {secretKeyRef: {name: gone, key: gone, optional: true}}}]`, nil},
		{"a secret stays one through a reference", `env: [{name: X, valueFrom: {secretKeyRef: {name: s, key: PASSWORD}}}, {name: YY, value: 'u:$(X)@h'}]`, []string{"X=!p'$(B)\x7f!", "YY=u:!p'$(B)\x7f!@h"}},
		{"envFrom configMap", `envFrom: [{configMapRef: {name: cm}}]`, []string{"A=from cm", "B=b", "MULTI=one\ntwo\n"}},
		{"envFrom secret", `envFrom: [{secretRef: {name: s}}]`, []string{"EMPTY=", "PASSWORD=!p'$(B)\x7f!"}},
		{"envFrom prefix", `envFrom: [{prefix: P_, configMapRef: {name: cm2}}]`, []string{"P_A=from cm2", "P_C=$(B)"}},
		{"later envFrom wins", `envFrom: [{configMapRef: {name: cm}}, {configMapRef: {name: cm2}}]`, []string{"A=from cm2", "B=b", "MULTI=one\ntwo\n", "C=$(B)"}},
		{"env wins over envFrom", `{envFrom: [{configMapRef: {name: cm2}}], env: [{name: A, value: mine}]}`, []string{"A=mine", "C=$(B)"}},
		{"envFrom optional", `envFrom: [{configMapRef: {name: gone, optional: true}}, {secretRef: {name: gone, optional: true}}]`, nil},
		{"envFrom of an empty object", `envFrom: [{configMapRef: {name: empty}}]`, nil},
		{"fieldRef metadata", `env: [{name: NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}, {name: S, valueFrom: {fieldRef: {fieldPath: metadata.namespace}}}, {name: U, valueFrom: {fieldRef: {apiVersion: v1, fieldPath: metadata.uid}}}]`, []string{"NAME=web-0", "S=ns", "U=11111111-2222-3333-4444-555555555555"}},
		{"fieldRef label", `env: [{name: L, valueFrom: {fieldRef: {fieldPath: "metadata.labels['tier/x.y']"}}}]`, []string{"L=a\"b\nc"}},
		{"fieldRef annotation", `env: [{name: L, valueFrom: {fieldRef: {fieldPath: "metadata.annotations['note']"}}}, {name: O, valueFrom: {fieldRef: {fieldPath: "metadata.annotations['a['b']c']"}}}]`, []string{"L=näh", "O=odd"}},
		{"fieldRef absent label", `env: [{name: L, valueFrom: {fieldRef: {fieldPath: "metadata.labels['no']"}}}]`, []string{"L="}},
		{"fieldRef all labels", `env: [{name: L, valueFrom: {fieldRef: {fieldPath: metadata.labels}}}]`, []string{"L=app=\"web\"\ntier/x.y=\"a\\\"b\\nc\""}},
		{"fieldRef spec", `env: [{name: NAME, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}, {name: S, valueFrom: {fieldRef: {fieldPath: spec.serviceAccountName}}}]`, []string{"NAME=knoc", "S=robot"}},
		{"fieldRef addresses", `env: [{name: A, valueFrom: {fieldRef: {fieldPath: status.podIP}}}, {name: B, valueFrom: {fieldRef: {fieldPath: status.podIPs}}}, {name: C, valueFrom: {fieldRef: {fieldPath: status.hostIP}}}, {name: D, valueFrom: {fieldRef: {fieldPath: status.hostIPs}}}, {name: E, value: 'http://$(A):80/'}]`,
			[]string{"A=<KNOC_POD_IP>", "B=<KNOC_POD_IPS>", "C=<KNOC_HOST_IP>", "D=<KNOC_HOST_IPS>", "E=http://<KNOC_POD_IP>:80/"}},
		{"resourceFieldRef", `{resources: {limits: {cpu: 1500m, memory: 100Mi}, requests: {cpu: 250m, memory: "1000001"}}, env: [
			{name: A, valueFrom: {resourceFieldRef: {resource: limits.cpu}}}, {name: B, valueFrom: {resourceFieldRef: {resource: limits.cpu, divisor: 1m}}},
			{name: C, valueFrom: {resourceFieldRef: {resource: limits.memory, divisor: 1Mi}}}, {name: D, valueFrom: {resourceFieldRef: {resource: requests.memory, divisor: 1k}}},
			{name: E, valueFrom: {resourceFieldRef: {resource: requests.cpu}}}, {name: F, valueFrom: {resourceFieldRef: {resource: limits.memory, divisor: "0"}}}]}`,
			[]string{"A=2", "B=1500", "C=100", "D=1001", "E=1", "F=104857600"}},
		{"resourceFieldRef without a limit is the node's", `env: [{name: A, valueFrom: {resourceFieldRef: {resource: limits.cpu}}}, {name: B, valueFrom: {resourceFieldRef: {resource: limits.memory, divisor: 1Gi}}}, {name: C, valueFrom: {resourceFieldRef: {resource: requests.cpu}}}, {name: D, valueFrom: {resourceFieldRef: {resource: limits.hugepages-2Mi}}}]`,
			[]string{"A=64", "B=256", "C=0", "D=0"}},
		{"resourceFieldRef of another container", `env: [{name: A, valueFrom: {resourceFieldRef: {containerName: other, resource: limits.cpu}}}, {name: B, valueFrom: {resourceFieldRef: {containerName: first, resource: requests.ephemeral-storage, divisor: 1Ki}}}]`,
			[]string{"A=3", "B=2"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c, pod := testContainer(t, tc.spec), testPod()
			pod.Spec.Containers = []v1.Container{*c, {Name: "other", Resources: v1.ResourceRequirements{Limits: v1.ResourceList{"cpu": resource.MustParse("3")}}}}
			pod.Spec.InitContainers = []v1.Container{{Name: "first", Resources: v1.ResourceRequirements{Requests: v1.ResourceList{"ephemeral-storage": resource.MustParse("2Ki")}}}}
			node := nodeFacts{Allocatable: v1.ResourceList{"cpu": resource.MustParse("64"), "memory": resource.MustParse("256Gi"), "hugepages-2Mi": resource.MustParse("1Gi")}}
			vars, err := stageEnv(t.Context(), pod, c, envObjects(), node)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, showEnv(vars)); diff != "" {
				t.Fatalf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestStageEnvErrors(t *testing.T) {
	for _, tc := range []struct {
		name, spec, want string
		later            bool // a notYet, else a refusal
	}{
		{"configMap", `env: [{name: A, valueFrom: {configMapKeyRef: {name: gone, key: k}}}]`, `CreateContainerConfigError: configmap "gone" not found`, true},
		{"configMap key", `env: [{name: A, valueFrom: {configMapKeyRef: {name: cm, key: k}}}]`, `CreateContainerConfigError: couldn't find key k in ConfigMap ns/cm`, true},
		{"binary key", `env: [{name: A, valueFrom: {configMapKeyRef: {name: cm, key: BIN}}}]`, `CreateContainerConfigError: couldn't find key BIN in ConfigMap ns/cm`, true},
		{"secret", `env: [{name: A, valueFrom: {secretKeyRef: {name: gone, key: k}}}]`, `CreateContainerConfigError: secret "gone" not found`, true},
		{"secret key", `env: [{name: A, valueFrom: {secretKeyRef: {name: s, key: k, optional: false}}}]`, `CreateContainerConfigError: couldn't find key k in Secret ns/s`, true},
		{"envFrom configMap", `envFrom: [{configMapRef: {name: gone}}]`, `CreateContainerConfigError: configmap "gone" not found`, true},
		{"envFrom secret", `envFrom: [{secretRef: {name: gone}}]`, `CreateContainerConfigError: secret "gone" not found`, true},
		{"fileKeyRef", `env: [{name: A, valueFrom: {fileKeyRef: {volumeName: v, path: p, key: k}}}]`, `fileKeyRef is not supported`, false},
		{"fieldRef", `env: [{name: A, valueFrom: {fieldRef: {fieldPath: status.phase}}}]`, `fieldPath "status.phase"`, false},
		{"fieldRef subscript", `env: [{name: A, valueFrom: {fieldRef: {fieldPath: "metadata.name['x']"}}}]`, `fieldPath "metadata.name['x']"`, false},
		{"fieldRef version", `env: [{name: A, valueFrom: {fieldRef: {apiVersion: v2, fieldPath: metadata.name}}}]`, `apiVersion "v2"`, false},
		{"resource", `env: [{name: A, valueFrom: {resourceFieldRef: {resource: limits.nvidia.com/gpu}}}]`, `resource "limits.nvidia.com/gpu"`, false},
		{"resource kind", `env: [{name: A, valueFrom: {resourceFieldRef: {resource: cpu}}}]`, `resource "cpu"`, false},
		{"resource container", `env: [{name: A, valueFrom: {resourceFieldRef: {containerName: gone, resource: limits.cpu}}}]`, `no container "gone"`, false},
		{"divisor", `env: [{name: A, valueFrom: {resourceFieldRef: {resource: limits.cpu, divisor: "-1"}}}]`, `divisor -1`, false},
		{"name with =", `env: [{name: a=b, value: x}]`, `variable name "a=b"`, false},
		{"name of other letters", `env: [{name: né, value: x}]`, `variable name "né"`, false},
		{"the runtime's own name", `env: [{name: APPTAINER_APPNAME, value: x}]`, `the container runtime keeps the variable APPTAINER_APPNAME`, false},
		{"the runtime's own prefix", `env: [{name: APPTAINER_a.b, value: x}]`, `the container runtime keeps the variable APPTAINER_a.b`, false},
		{"empty home", `env: [{name: HOME, value: ""}]`, `HOME must be an absolute path`, false},
		{"relative home", `env: [{name: HOME, value: x}]`, `HOME must be an absolute path`, false},
		{"home with a colon", `env: [{name: HOME, value: "/a:/b"}]`, `HOME must be an absolute path`, false},
		{"not UTF-8", `env: [{name: A, valueFrom: {secretKeyRef: {name: bin, key: X}}}]`, `CreateContainerError: env of container c: the value of A is not valid UTF-8`, true},
		{"empty name", `env: [{name: "", value: x}]`, `variable name ""`, false},
		{"name with a newline", `env: [{name: "A\nB", value: x}]`, `variable name "A\nB"`, false},
		{"prefix", `envFrom: [{prefix: a=, configMapRef: {name: cm}}]`, `envFrom of container c: the variable name "a=A"`, false},
		{"NUL in a secret", `env: [{name: A, valueFrom: {secretKeyRef: {name: nul, key: X}}}]`, `value of A holds a NUL byte`, false},
		{"NUL through envFrom", `envFrom: [{secretRef: {name: nul}}]`, `value of X holds a NUL byte`, false},
		{"NUL", `env: [{name: A, value: "x\0y"}]`, `value of A holds a NUL byte`, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			vars, err := stageEnv(t.Context(), testPod(), testContainer(t, tc.spec), envObjects(), nodeFacts{})
			checkError(t, err, tc.want, tc.later)
			if vars != nil {
				t.Fatalf("variables beside an error: %v", vars)
			}
		})
	}
}

// checkError wants a *notYet (later) or a *refusal whose text contains want.
func checkError(t *testing.T, err error, want string, later bool) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), want) {
		t.Fatalf("got error %v, want one with %q", err, want)
	}
	var n *notYet
	var r *refusal
	if errors.As(err, &n) != later || errors.As(err, &r) == later {
		t.Fatalf("error %#v: want a notYet: %v", err, later)
	}
}

// An API server that cannot be asked is no reason to give a pod up, optional or
// not; and a loop that is told to end is told so.
func TestStageEnvUnreachable(t *testing.T) {
	objs := envObjects()
	objs.broken = errors.New("dial tcp: connection refused")
	c := testContainer(t, `env: [{name: X, valueFrom: {secretKeyRef: {name: s, key: k, optional: true}}}]`)
	_, err := stageEnv(t.Context(), testPod(), c, objs, nodeFacts{})
	checkError(t, err, "CreateContainerConfigError: dial tcp: connection refused", true)

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err = stageEnv(ctx, testPod(), c, objs, nodeFacts{}); !errors.Is(err, context.Canceled) {
		t.Fatalf("got %v after the context ended", err)
	}
}

func TestExpand(t *testing.T) {
	vars := map[string][]valuePart{
		"A":     {{Text: "a"}},
		"EMPTY": nil,
		"REF":   {{Text: "$(A)"}},
		"b.c":   {{Text: "dotted"}},
		"IP":    {{Var: varPodIP}},
		"S":     {{Text: "s", Secret: true}},
	}
	lookup := func(name string) ([]valuePart, bool) { v, ok := vars[name]; return v, ok }
	for in, want := range map[string]string{
		"":               "",
		"plain":          "plain",
		"$(A)":           "a",
		"x$(A)y$(A)z":    "xayaz",
		"$(EMPTY)":       "",
		"$(NO)":          "$(NO)",
		"$(NO)$(A)":      "$(NO)a",
		"$$(A)":          "$(A)",
		"$$$(A)":         "$a",
		"$$$$(A)":        "$$(A)",
		"$$":             "$",
		"$":              "$",
		"a$":             "a$",
		"$(A":            "$(A",
		"$(A$(A)":        "$(A$(A)",
		"$(":             "$(",
		"$()":            "$()",
		"$)":             "$)",
		"$A ${A}":        "$A ${A}",
		"$é$(A)":         "$éa",
		"\xff$\xfe$(A)":  "\xff$\xfea",
		"$(REF)":         "$(A)",
		"$(b.c)":         "dotted",
		"$( A )":         "$( A )",
		"http://$(IP):1": "http://<KNOC_POD_IP>:1",
		"-p$(S)-$(A)":    "-p!s!-a",
		"$(A)\n$(A)":     "a\na",
	} {
		if got := showParts(expand(in, lookup)); got != want {
			t.Errorf("expand(%q) = %q, want %q", in, got, want)
		}
	}
	if got := expand("1$(A)2$$3", lookup); len(got) != 1 {
		t.Fatalf("literal text is not one part: %v", got)
	}
}
