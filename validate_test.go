package knoc

import (
	"errors"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/yaml"
)

// Every field of the API's types has a rule, and every rule is of a field: when
// a new version of the API brings a field, somebody has to decide about it.
func TestFieldRulesCoverTheAPI(t *testing.T) {
	for typ, rules := range fieldRules {
		fields := map[string]bool{}
		for i := range typ.NumField() {
			f := typ.Field(i)
			if f.Anonymous && jsonName(f) == "" && f.Type == typeOf[v1.LocalObjectReference]() {
				f, _ = f.Type.FieldByName("Name")
			}
			name := jsonName(f)
			fields[name] = true
			r, ok := rules[name]
			if !ok {
				t.Errorf("%s.%s has no rule", typ, name)
			}
			if r.How != honoured && r.Note == "" {
				t.Errorf("%s.%s: the rule does not say why", typ, name)
			}
		}
		for name := range rules {
			if !fields[name] {
				t.Errorf("%s has no field %q", typ, name)
			}
		}
	}
	for _, typ := range []reflect.Type{typeOf[v1.PodSpec](), typeOf[v1.Container](), typeOf[v1.PodSecurityContext](), typeOf[v1.SecurityContext](), typeOf[v1.VolumeSource]()} {
		if fieldRules[typ] == nil {
			t.Errorf("%s has no rules", typ)
		}
	}
}

// What the rules go down into from a pod's spec is all that they hold, and what
// they do not go into is here: types that are honoured or refused as a whole.
func TestFieldRulesReachEveryType(t *testing.T) {
	whole := map[reflect.Type]bool{}
	for _, typ := range []reflect.Type{
		// The scheduler's.
		typeOf[v1.Affinity](), typeOf[v1.Toleration](), typeOf[v1.TopologySpreadConstraint](), typeOf[v1.PodSchedulingGate](), typeOf[v1.PodSchedulingGroup](), typeOf[v1.EvictionResponder](),
		// Nothing to do.
		typeOf[v1.ContainerPort](),
		// Resolved field by field in env.go and volumes.go.
		typeOf[v1.EnvFromSource](), typeOf[v1.ObjectFieldSelector](), typeOf[v1.ResourceFieldSelector](), typeOf[v1.ConfigMapKeySelector](), typeOf[v1.SecretKeySelector](),
		// A number or a name, which probes.go resolves.
		typeOf[intstr.IntOrString](),
		// A size.
		typeOf[resource.Quantity](),
	} {
		whole[typ] = true
	}
	reached := map[reflect.Type]bool{}
	var walk func(typ reflect.Type)
	walk = func(typ reflect.Type) {
		for typ.Kind() == reflect.Pointer || typ.Kind() == reflect.Slice {
			typ = typ.Elem()
		}
		if typ.Kind() != reflect.Struct || reached[typ] {
			return
		}
		reached[typ] = true
		rules, ok := fieldRules[typ]
		if !ok {
			if !whole[typ] {
				t.Errorf("%s is reached and has no rules", typ)
			}
			return
		}
		for i := range typ.NumField() {
			f := typ.Field(i)
			if r, ok := rules[jsonName(f)]; ok && r.How == honoured {
				walk(f.Type)
			}
		}
	}
	walk(typeOf[v1.PodSpec]())
	for typ := range fieldRules {
		if !reached[typ] {
			t.Errorf("%s has rules and is not reached", typ)
		}
	}
	for typ := range whole {
		if !reached[typ] {
			t.Errorf("%s is not reached", typ)
		}
	}
}

// defaultedPod is a plain pod as an API server 1.37 hands it out, with all that
// its defaults and admission plug-ins write into it.
const defaultedPod = `
metadata: {name: web-0, namespace: ns, uid: 11111111-2222-3333-4444-555555555555, labels: {app: web}}
spec:
  containers:
  - name: c
    image: busybox
    command: [sh, -c, 'echo "$A"']
    env: [{name: A, value: x}]
    ports: [{containerPort: 80, protocol: TCP}]
    imagePullPolicy: Always
    resources: {requests: {cpu: 100m}, limits: {nvidia.com/gpu: 1}}
    resizePolicy: [{resourceName: cpu, restartPolicy: NotRequired}]
    securityContext: {}
    terminationMessagePath: /dev/termination-log
    terminationMessagePolicy: File
    volumeMounts:
    - {mountPath: /var/run/secrets/kubernetes.io/serviceaccount, name: kube-api-access-abcde, readOnly: true, recursiveReadOnly: Disabled}
  dnsPolicy: ClusterFirst
  enableServiceLinks: true
  nodeName: knoc
  nodeSelector: {kubernetes.io/hostname: knoc}
  preemptionPolicy: PreemptLowerPriority
  priority: 0
  restartPolicy: Always
  schedulerName: default-scheduler
  securityContext: {}
  serviceAccount: default
  serviceAccountName: default
  terminationGracePeriodSeconds: 30
  tolerations:
  - {effect: NoExecute, key: node.kubernetes.io/not-ready, operator: Exists, tolerationSeconds: 300}
  - {effect: NoExecute, key: node.kubernetes.io/unreachable, operator: Exists, tolerationSeconds: 300}
  volumes:
  - name: kube-api-access-abcde
    projected:
      defaultMode: 420
      sources:
      - serviceAccountToken: {expirationSeconds: 3607, path: token}
      - configMap: {items: [{key: ca.crt, path: ca.crt}], name: kube-root-ca.crt}
      - downwardAPI: {items: [{fieldRef: {apiVersion: v1, fieldPath: metadata.namespace}, path: namespace}]}
`

// restricted is what the Pod Security Standard "restricted" demands of a pod.
const restricted = `
spec:
  securityContext: {runAsNonRoot: true, seccompProfile: {type: RuntimeDefault}}
  containers:
  - {name: c, image: busybox, securityContext: {allowPrivilegeEscalation: false, privileged: false, procMount: Default, capabilities: {drop: [ALL]}}}
`

func podFrom(t *testing.T, text string) *v1.Pod {
	t.Helper()
	pod := testPod()
	pod.Spec = v1.PodSpec{}
	if err := yaml.UnmarshalStrict([]byte(text), pod); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return pod
}

func TestCheckPodQuiet(t *testing.T) {
	for name, text := range map[string]string{
		"as the API server hands it out": defaultedPod,
		"as a fork may write it":         `spec: {containers: [{name: c, image: busybox}]}`,
		"everything honoured": `
spec:
  restartPolicy: OnFailure
  activeDeadlineSeconds: 60
  terminationGracePeriodSeconds: 5
  automountServiceAccountToken: false
  enableServiceLinks: false
  hostNetwork: true
  hostUsers: false
  shareProcessNamespace: false
  setHostnameAsFQDN: false
  dnsPolicy: Default
  os: {name: linux}
  overhead: {cpu: 1}
  affinity: {podAntiAffinity: {}}
  topologySpreadConstraints: [{maxSkew: 1, topologyKey: kubernetes.io/hostname, whenUnsatisfiable: DoNotSchedule}]
  priorityClassName: high
  volumes:
  - {name: e, emptyDir: {}}
  - {name: none}
  - {name: cm, configMap: {name: cm, defaultMode: 0400, optional: true, items: [{key: a, path: d/a, mode: 0777}]}}
  - {name: s, secret: {secretName: s, optional: false, items: [{key: a, path: a}]}}
  - {name: d, downwardAPI: {items: [{path: l, fieldRef: {fieldPath: metadata.labels}}, {path: c, resourceFieldRef: {containerName: c, resource: limits.cpu, divisor: 1m}}]}}
  - {name: p, projected: {sources: [{secret: {name: s, optional: true}}, {serviceAccountToken: {path: t, audience: a}}]}}
  initContainers: [{name: i, image: busybox, args: ["$(X)"], volumeMounts: [{name: e, mountPath: /e, mountPropagation: None, recursiveReadOnly: IfPossible}]}]
  containers:
  - name: c
    image: busybox
    workingDir: /tmp
    imagePullPolicy: IfNotPresent
    lifecycle: {}
    startupProbe: {grpc: {port: 1, service: a, mode: TLS}, failureThreshold: 3, initialDelaySeconds: 1, terminationGracePeriodSeconds: 1}
    readinessProbe: {httpGet: {path: /, port: 80, host: h, scheme: HTTPS, protocol: HTTP1, httpHeaders: [{name: A, value: b}]}, successThreshold: 2, timeoutSeconds: 1}
    livenessProbe: {exec: {command: [a]}, periodSeconds: 5}
    envFrom: [{prefix: P_, configMapRef: {name: cm}}, {secretRef: {name: s, optional: true}}]
    env: [{name: A, valueFrom: {fieldRef: {fieldPath: status.podIP}}}, {name: B, valueFrom: {resourceFieldRef: {resource: limits.cpu}}}, {name: C, valueFrom: {secretKeyRef: {name: s, key: k}}}, {name: D, valueFrom: {configMapKeyRef: {name: s, key: k}}}]
    securityContext: {runAsNonRoot: true, readOnlyRootFilesystem: false, seccompProfile: {type: Unconfined}, capabilities: {add: [], drop: [ALL]}}
`,
	} {
		sentences, err := checkPod(podFrom(t, text))
		if err != nil || len(sentences) > 0 {
			t.Errorf("%s: %v, %q", name, err, sentences)
		}
	}
}

func TestCheckPodIgnored(t *testing.T) {
	sentences, err := checkPod(podFrom(t, restricted))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"spec.securityContext.seccompProfile.type: RuntimeDefault is ignored: the cluster's own runtime and kernel policy hold"}, sentences); diff != "" {
		t.Fatal(diff)
	}

	sentences, err = checkPod(podFrom(t, `
spec:
  hostname: web
  subdomain: sub
  setHostnameAsFQDN: true
  dnsPolicy: None
  dnsConfig: {nameservers: [192.0.2.1]}
  runtimeClassName: nvidia
  readinessGates: [{conditionType: example.com/ready}]
  imagePullSecrets: [{name: pull}]
  securityContext: {fsGroup: 1000, fsGroupChangePolicy: Always, supplementalGroups: [1, 2]}
  volumes: [{name: m, emptyDir: {medium: Memory, sizeLimit: 1Gi}}, {name: s, secret: {secretName: s, defaultUser: 5, items: [{key: k, path: p, user: 0}]}}]
  containers: [{name: c, image: i, stdin: true, stdinOnce: true, tty: true, imagePullPolicy: Never, terminationMessagePath: "/tmp/with space", terminationMessagePolicy: FallbackToLogsOnError, securityContext: {readOnlyRootFilesystem: true, allowPrivilegeEscalation: true, appArmorProfile: {type: RuntimeDefault}}}]
`))
	if err != nil {
		t.Fatal(err)
	}
	var fields []string
	for _, s := range sentences {
		field, note, ok := strings.Cut(s, " is ignored: ")
		if !ok || note == "" {
			t.Errorf("%q is no sentence", s)
		}
		fields = append(fields, field)
	}
	want := []string{
		"spec.volumes[s].secret.items[0].user: 0", "spec.volumes[s].secret.defaultUser: 5",
		"spec.containers[c].securityContext.appArmorProfile.type: RuntimeDefault",
		"spec.containers[c].stdin: true", "spec.containers[c].stdinOnce: true", "spec.containers[c].tty: true",
		"spec.runtimeClassName: nvidia",
	}
	if diff := cmp.Diff(want, fields); diff != "" {
		t.Fatal(diff)
	}
}

func TestCheckPodRefused(t *testing.T) {
	spec := func(fields string) string {
		return "spec: {" + fields + ", containers: [{name: c, image: i}]}"
	}
	container := func(fields string) string {
		return "spec: {volumes: [{name: v, emptyDir: {}}], containers: [{name: c, image: i, " + fields + "}]}"
	}
	volume := func(source string) string { return spec("volumes: [{name: v, " + source + "}]") }
	for _, tc := range []struct{ text, want string }{
		{spec(`hostPID: true`), "UnsupportedField: spec.hostPID: true is not supported: "},
		{spec(`hostIPC: true`), "spec.hostIPC: true is not supported: "},
		{spec(`os: {name: windows}`), "spec.os.name: windows is not supported"},
		{spec(`resourceClaims: [{name: a}]`), "spec.resourceClaims is not supported"},
		{spec(`resources: {limits: {cpu: 1}}`), "spec.resources is not supported"},
		{spec(`securityContext: {runAsUser: -1}`), "InvalidPod: container c: the user or group id -1 is not one of"},
		{spec(`securityContext: {supplementalGroups: [2147483648]}`), "InvalidPod: container c: the user or group id 2147483648 is not one of"},
		{spec(`securityContext: {runAsUser: 0, runAsNonRoot: true}`), "container c: runAsUser is 0, which breaks runAsNonRoot"},
		{spec(`securityContext: {fsGroup: 5, runAsNonRoot: true}`), "container c: runAsNonRoot with groups needs runAsUser"},
		{spec(`securityContext: {sysctls: [{name: a, value: b}]}`), "spec.securityContext.sysctls is not supported"},
		{spec(`securityContext: {seLinuxOptions: {level: a}}`), "seLinuxOptions is not supported"},
		{spec(`securityContext: {windowsOptions: {hostProcess: true}}`), "windowsOptions is not supported"},
		{spec(`securityContext: {seccompProfile: {type: Localhost, localhostProfile: p.json}}`), "spec.securityContext.seccompProfile.localhostProfile: p.json is not supported"},
		{spec(`restartPolicy: Sometimes`), `InvalidPod: spec.restartPolicy: "Sometimes"`},
		{container(`lifecycle: {stopSignal: SIGSTOP}`), `container c: lifecycle.stopSignal: "SIGSTOP" is not supported: the runtime does not hand it on`},
		{container(`lifecycle: {preStop: {exec: {}}}`), "InvalidPod: container c: lifecycle.preStop"},
		{container(`terminationMessagePath: message`), `container c: terminationMessagePath: "message" is not supported; use an absolute path`},
		{container(`terminationMessagePath: /dev/shm/message`), `container c: terminationMessagePath: "/dev/shm/message" is not supported: /dev/shm is the runtime's own; use another path`},
		{container(`terminationMessagePath: /dev`), `container c: terminationMessagePath: "/dev" is not supported: it is a directory`},
		{container(`terminationMessagePath: "/dev/it's"`), `container c: terminationMessagePath: "/dev/it's" is not supported: below /dev there can be`},
		{container(`volumeMounts: [{name: v, mountPath: /dev/null}]`), `container c: a volume cannot be mounted at "/dev/null": /dev/null is the runtime's own; use another path`},
		{container(`volumeMounts: [{name: v, mountPath: /dev/shm/sub}]`), `container c: a volume cannot be mounted at "/dev/shm/sub": /dev/shm is the runtime's own`},
		{container(`terminationMessagePolicy: Guess`), `InvalidPod: container c: terminationMessagePolicy: "Guess"`},
		{container(`restartPolicy: Sometimes`), `InvalidPod: the restartPolicy of container c: "Sometimes"`},
		{container(`restartPolicyRules: [{action: RestartAllContainers}]`), "spec.containers[c].restartPolicyRules[0].action: RestartAllContainers is not supported"},
		{container(`restartPolicyRules: [{action: Restart, exitCodes: {operator: Over, values: [4]}}]`), "restartPolicyRules[0].exitCodes.operator: Over is not supported"},
		{container(`livenessProbe: {}`), "InvalidPod: container c: livenessProbe: it has no handler"},
		{container(`readinessProbe: {httpGet: {port: web}}`), `InvalidPod: container c: readinessProbe: port: "web" is neither`},
		{container(`startupProbe: {exec: {command: ["a\0b"]}}`), "spec.containers[c].startupProbe.exec.command[0] holds a NUL byte"},
		{container(`volumeDevices: [{name: v, devicePath: /dev/x}]`), "volumeDevices is not supported"},
		{container(`resources: {claims: [{name: a}]}`), "spec.containers[c].resources.claims is not supported"},
		{container(`securityContext: {privileged: true}`), "spec.containers[c].securityContext.privileged: true is not supported"},
		{container(`securityContext: {runAsUser: 0, runAsNonRoot: true}`), "container c: runAsUser is 0, which breaks runAsNonRoot"},
		{container(`securityContext: {capabilities: {drop: ["A;id"]}}`), `the capability "A;id" is none`},
		{container(`securityContext: {capabilities: {add: [NET_ADMIN]}}`), "spec.containers[c].securityContext.capabilities.add is not supported"},
		{container(`securityContext: {procMount: Unmasked}`), "procMount: Unmasked is not supported"},
		{container(`volumeMounts: [{name: v, mountPath: /v, subPath: "../a b"}]`), `UnsupportedVolume: container c: the mount of volume "v" at "/v" has the path "../a b" in its volume, which must not contain ".."`},
		{container(`volumeMounts: [{name: v, mountPath: /v, subPathExpr: $(A), subPath: a}]`), "both a subPath and a subPathExpr"},
		{container(`volumeMounts: [{name: v, mountPath: /v, mountPropagation: Bidirectional}]`), "mountPropagation: Bidirectional is not supported"},
		{container(`volumeMounts: [{name: v, mountPath: /v, recursiveReadOnly: Enabled}]`), "recursiveReadOnly: Enabled is not supported"},
		{container(`volumeMounts: [{name: v, mountPath: /v, bindMountOptions: [noexec]}]`), "bindMountOptions is not supported"},
		{container(`volumeMounts: [{name: w, mountPath: /v}]`), `UnsupportedVolume: container c: the mount of volume "w" at "/v" names no volume`},
		{container(`env: [{name: A, valueFrom: {fileKeyRef: {volumeName: v, path: p, key: k}}}]`), "spec.containers[c].env[A].valueFrom.fileKeyRef is not supported"},
		{container(`env: [{name: a=b, value: x}]`), `the variable name "a=b"`},
		{container(`env: [{name: A, valueFrom: {fieldRef: {fieldPath: spec.x}}}]`), `container c: env A: fieldRef: fieldPath "spec.x"`},
		{container(`env: [{name: A, valueFrom: {resourceFieldRef: {resource: limits.x}}}]`), `resource "limits.x"`},
		{volume(`iscsi: {lun: 1, iqn: a, targetPortal: b}`), "UnsupportedVolume: spec.volumes[v].iscsi is not supported: "},
		{volume(`hostPath: {path: ../etc}`), `InvalidPod: spec.volumes[v]: hostPath.path: "../etc": must be absolute, without ".."`},
		{volume(`hostPath: {path: /etc, type: Fifo}`), `hostPath.type: "Fifo" is an invalid volume type`},
		{volume(`nfs: {server: a, path: /b/../c}`), `nfs: "a:/b/../c": needs a server`},
		{volume(`csi: {driver: a}`), "spec.volumes[v].csi is not supported"},
		{volume(`csi: {}`), "spec.volumes[v].csi is not supported"},
		{volume(`image: {reference: i}`), "spec.volumes[v].image is not supported"},
		{volume(`ephemeral: {}`), "spec.volumes[v].ephemeral is not supported"},
		{volume(`emptyDir: {medium: HugePages-2Mi}`), `emptyDir.medium: "HugePages-2Mi" is not supported`},
		{volume(`emptyDir: {}, configMap: {name: x}`), "InvalidPod: spec.volumes[v]: it has 2 kinds"},
		{volume(`projected: {sources: [{clusterTrustBundle: {path: p}}]}`), "UnsupportedVolume: spec.volumes[v].projected.sources[0].clusterTrustBundle is not supported"},
		{volume(`projected: {sources: [{podCertificate: {}}]}`), "podCertificate is not supported"},
		{volume(`projected: {sources: [{}]}`), "source 0 does not have exactly one kind"},
		{volume(`projected: {sources: [{serviceAccountToken: {path: ../t}}]}`), `the path "../t"`},
		{volume(`projected: {sources: [{configMap: {name: a, items: [{key: k, path: /p}]}}]}`), `the path "/p"`},
		{volume(`secret: {secretName: a, items: [{key: k, path: a/../../b}]}`), `spec.volumes[v]: the path "a/../../b"`},
		{volume(`secret: {secretName: a, defaultMode: 4755}`), `the mode`},
		{volume(`configMap: {name: a, items: [{key: k, path: a, mode: -1}]}`), `the mode`},
		{volume(`downwardAPI: {items: [{path: p, fieldRef: {fieldPath: status.podIP}}]}`), `fieldPath "status.podIP"`},
		{`spec: {containers: []}`, "InvalidPod: spec.containers: the pod has no container"},
		{`spec: {containers: [{name: c}]}`, "container c has no image"},
		{`spec: {containers: [{name: "a;b", image: i}]}`, `the name of a container: "a;b"`},
		{`spec: {containers: [{name: "", image: i}]}`, `the name of a container: ""`},
		{`spec: {containers: [{name: c, image: i}], initContainers: [{name: c, image: i}]}`, `"c": two containers have it`},
		{spec(`volumes: [{name: ../v}]`), `the name of a volume: "../v"`},
		{spec(`volumes: [{name: v}, {name: v}]`), `"v": two volumes have it`},
		{`{metadata: {uid: ../x}, spec: {containers: [{name: c, image: i}]}}`, `metadata.uid: "../x"`},
		{`{metadata: {name: "a\nb"}, spec: {containers: [{name: c, image: i}]}}`, `metadata.name: "a\nb"`},
		{`{metadata: {namespace: A}, spec: {containers: [{name: c, image: i}]}}`, `metadata.namespace: "A"`},
		{container(`args: ["a\0b"]`), "UnsupportedField: spec.containers[c].args[0] holds a NUL byte"},
		{container(`env: [{name: A, value: "secret\0"}]`), "spec.containers[c].env[A].value holds a NUL byte"},
		{container(`workingDir: "\0"`), "spec.containers[c].workingDir holds a NUL byte"},
		{`{metadata: {annotations: {a: "\0"}}, spec: {containers: [{name: c, image: i}]}}`, "metadata.annotations holds a NUL byte"},
		{spec(`nodeSelector: {a: "\0"}`), "spec.nodeSelector holds a NUL byte"},
	} {
		_, err := checkPod(podFrom(t, tc.text))
		var r *refusal
		if !errors.As(err, &r) || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s:\ngot  %v\nwant %s", tc.text, err, tc.want)
		}
		if err != nil && strings.Contains(err.Error(), "secret\x00") {
			t.Errorf("a value stands in the error: %v", err)
		}
	}

	// All of what is wrong is said at once, each thing once.
	_, err := checkPod(podFrom(t, `spec: {hostPID: true, volumes: [{name: v, iscsi: {lun: 1, iqn: a, targetPortal: b}}], containers: [{name: c, image: i, lifecycle: {stopSignal: SIGTSTP}}]}`))
	if err == nil || strings.Count(err.Error(), "is not supported") != 3 || !strings.HasPrefix(err.Error(), "UnsupportedVolume: spec.volumes[v].iscsi") {
		t.Fatal(err)
	}
}

// Every refused or ignored field that can be set is noticed when it is: set each
// field of each type with rules, alone, and look.
func TestEveryFieldIsNoticed(t *testing.T) {
	for typ, rules := range fieldRules {
		for i := range typ.NumField() {
			f := typ.Field(i)
			r, ok := rules[jsonName(f)]
			if !ok || r.How == honoured {
				continue
			}
			v := reflect.New(typ).Elem()
			setSomething(v.Field(i))
			k := checker{}
			k.fields("x", v)
			noticed := len(k.refused) + len(k.ignored)
			if quiet := r.quiet(v.Field(i)); !quiet && noticed == 0 {
				t.Errorf("%s.%s was set and nothing was said", typ, f.Name)
			}
			if (len(k.refused) > 0) != (r.How == refused) && noticed > 0 {
				t.Errorf("%s.%s: refused %q, ignored %q", typ, f.Name, k.refused, k.ignored)
			}
		}
	}
}

// setSomething gives a value that is not the zero value.
func setSomething(v reflect.Value) {
	switch v.Kind() {
	case reflect.String:
		v.SetString("something")
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int32, reflect.Int64:
		v.SetInt(7)
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		if v.Elem().Kind() != reflect.Struct {
			setSomething(v.Elem())
			return
		}
		for i := range v.Elem().NumField() {
			if f := v.Elem().Field(i); f.CanSet() && f.Kind() != reflect.Struct && f.Kind() != reflect.Interface {
				setSomething(f)
				return
			}
		}
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem())
	}
}
