package knoc

import (
	"errors"
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation"
)

// treatment is what becomes of a field of a pod.
type treatment uint8

const (
	// honoured: it has its effect, here or in the scheduler before.
	honoured treatment = iota
	// ignored: it has no effect, and the pod runs; an event says so.
	ignored
	// refused: the pod would not be what was asked for without it, so it does not run.
	refused
)

// rule is the treatment of one field.
type rule struct {
	How treatment
	// Quiet are values that need no word: the API server's defaults, and what
	// holds for an unprivileged user on a cluster anyway. "*" is every value.
	Quiet []string
	// Note says what happens instead, or what to do instead.
	Note string
}

func honour(note string) rule                  { return rule{honoured, nil, note} }
func ignore(note string, quiet ...string) rule { return rule{ignored, quiet, note} }
func reject(note string, quiet ...string) rule { return rule{refused, quiet, note} }
func typeOf[T any]() reflect.Type              { return reflect.TypeFor[T]() }
func (r rule) quiet(value reflect.Value) bool {
	return slices.Contains(r.Quiet, "*") || slices.Contains(r.Quiet, scalar(value))
}

const (
	byScheduler = "what the scheduler and the API server use; nothing is left to do on the node"
	oneUser     = "everything on the cluster runs as and belongs to the one HPC user"
	noVolume    = "knoc cannot reach this kind of storage from the cluster; use emptyDir, configMap, secret, downwardAPI, projected, hostPath, nfs or a claim of these"
	noPrivilege = "a job on the cluster has no privileges to give"
	inVolume    = "found on the compute node right before the container starts; a path that leads out of its volume fails the container"
	ownHostName = "containers have a host name and a hosts file of their own"
	subIDs      = "by the HPC user's subordinate ids, as apptainer --fakeroot; the volumes are on the compute node then. Where there are none, as `--without-subids` says"
	notRoot     = "containers run as the HPC user unless an id says otherwise; root is refused. The image's user is not read"
)

// fieldRules are the treatment of every field of a pod's spec: by type, then by
// name in JSON. checkPod follows them, so that they are what happens, and a
// field that is not in them is refused. The README's table is made from them,
// and a test compares them with the API's types.
var fieldRules = map[reflect.Type]map[string]rule{
	typeOf[v1.PodSpec](): {
		"volumes":                       honour(""),
		"initContainers":                honour("in order, each to its end"),
		"containers":                    honour("side by side in one job"),
		"ephemeralContainers":           honour("what can not be honoured keeps that container from starting, not the pod"),
		"restartPolicy":                 honour(""),
		"terminationGracePeriodSeconds": honour(""),
		"activeDeadlineSeconds":         honour("counted from the job's start; the job's time limit lies a minute and the grace period behind it"),
		"dnsPolicy":                     honour("but for the cluster's own DNS: containers use the compute node's resolver, unless None says otherwise"),
		"nodeSelector":                  honour(byScheduler),
		"serviceAccountName":            honour(""),
		"serviceAccount":                honour("the old name of serviceAccountName"),
		"automountServiceAccountToken":  honour("the API server adds the volume"),
		"nodeName":                      honour(byScheduler),
		"hostNetwork":                   honour("pods always use the compute node's network; with it they have its host name too"),
		"hostPID":                       reject("containers have their own process namespace"),
		"hostIPC":                       reject("containers have their own IPC namespace"),
		"shareProcessNamespace":         honour("what a container leaves behind in it ends with the pod; needs user namespaces"),
		"securityContext":               honour(""),
		"imagePullSecrets":              honour("the credentials are used for the pull only"),
		"hostname":                      honour(ownHostName),
		"subdomain":                     honour(ownHostName),
		"affinity":                      honour(byScheduler),
		"schedulerName":                 honour(byScheduler),
		"tolerations":                   honour(byScheduler),
		"hostAliases":                   honour(ownHostName),
		"priorityClassName":             honour(byScheduler),
		"priority":                      honour(byScheduler),
		"dnsConfig":                     honour("in /etc/resolv.conf, after what the compute node has"),
		"readinessGates":                honour(""),
		"runtimeClassName":              ignore("the cluster's own container runtime is used"),
		"enableServiceLinks":            honour("services have the cluster's own addresses, which compute nodes may not reach; see --api-server-for-pods"),
		"preemptionPolicy":              honour(byScheduler),
		"overhead":                      honour("part of the job's request"),
		"topologySpreadConstraints":     honour(byScheduler),
		"setHostnameAsFQDN":             honour(ownHostName),
		"os":                            honour(""),
		"hostUsers":                     ignore("the runtime decides whether a user namespace is used", "*"),
		"schedulingGates":               honour(byScheduler),
		"resourceClaims":                reject("dynamic resource allocation has no driver on the cluster; ask for nvidia.com/gpu or use the job's flags"),
		"resources":                     reject("set the resources of the containers instead; the job asks for their sum"),
		"hostnameOverride":              honour(ownHostName),
		"schedulingGroup":               honour(byScheduler),
		"evictionResponders":            honour(byScheduler),
	},
	typeOf[v1.HostAlias]():            {"ip": honour(""), "hostnames": honour("")},
	typeOf[v1.PodOS]():                {"name": reject("the cluster runs Linux", "linux")},
	typeOf[v1.PodReadinessGate]():     {"conditionType": honour("")},
	typeOf[v1.PodDNSConfig]():         {"nameservers": honour(""), "searches": honour(""), "options": honour("")},
	typeOf[v1.PodDNSConfigOption]():   {"name": honour(""), "value": honour("")},
	typeOf[v1.LocalObjectReference](): {"name": honour("")},
	typeOf[v1.Container](): {
		"name":                     honour(""),
		"image":                    honour(""),
		"command":                  honour(""),
		"args":                     honour(""),
		"workingDir":               honour(""),
		"ports":                    honour("nothing to do: the container listens on the compute node's address"),
		"envFrom":                  honour(""),
		"env":                      honour(""),
		"resources":                honour("the job asks for the sum of the requests"),
		"resizePolicy":             ignore("a job's size never changes", "*"),
		"restartPolicy":            honour("init containers with Always are sidecars"),
		"restartPolicyRules":       honour(""),
		"volumeMounts":             honour(""),
		"volumeDevices":            reject("a job cannot open raw block devices"),
		"livenessProbe":            honour(""),
		"readinessProbe":           honour(""),
		"startupProbe":             honour(""),
		"lifecycle":                honour(""),
		"terminationMessagePath":   honour(""),
		"terminationMessagePolicy": honour(""),
		"imagePullPolicy":          honour(""),
		"securityContext":          honour(""),
		"stdin":                    ignore("the container's standard input is empty"),
		"stdinOnce":                ignore("the container's standard input is empty"),
		"tty":                      ignore("the container's output goes to its log without a terminal"),
	},
	typeOf[v1.Probe](): {
		"":                              honour("the kinds below"),
		"initialDelaySeconds":           honour(""),
		"timeoutSeconds":                honour(""),
		"periodSeconds":                 honour(""),
		"successThreshold":              honour(""),
		"failureThreshold":              honour(""),
		"terminationGracePeriodSeconds": honour(""),
	},
	typeOf[v1.ProbeHandler](): {
		"exec":      honour(""),
		"httpGet":   honour("with the compute node's curl"),
		"tcpSocket": honour("with the compute node's curl"),
		"grpc":      honour("with the compute node's curl"),
	},
	typeOf[v1.ExecAction](): {"command": honour("")},
	typeOf[v1.HTTPGetAction](): {
		"path": honour(""), "port": honour(""), "scheme": honour(""), "httpHeaders": honour(""), "protocol": honour(""),
		"host": honour("the pod's address otherwise, which is the compute node's"),
	},
	typeOf[v1.HTTPHeader]():      {"name": honour(""), "value": honour("")},
	typeOf[v1.TCPSocketAction](): {"port": honour(""), "host": honour("the pod's address otherwise, which is the compute node's")},
	typeOf[v1.GRPCAction]():      {"port": honour("at the pod's address"), "service": honour(""), "mode": honour("")},
	typeOf[v1.EphemeralContainer](): {
		"":                    honour(""),
		"targetContainerName": ignore("ephemeral containers have a process namespace of their own, unless the pod has shareProcessNamespace"),
	},
	typeOf[v1.PodSecurityContext](): {
		"seLinuxOptions":           reject(noPrivilege),
		"windowsOptions":           reject("the cluster runs Linux"),
		"runAsUser":                honour(subIDs),
		"runAsGroup":               honour(subIDs),
		"runAsNonRoot":             honour(notRoot),
		"supplementalGroups":       honour(subIDs),
		"supplementalGroupsPolicy": honour("the groups that an image gives a user are never added"),
		"fsGroup":                  honour(subIDs),
		"sysctls":                  reject(noPrivilege),
		"fsGroupChangePolicy":      honour("nothing to do: the volumes are new with each pod"),
		"seccompProfile":           honour(""),
		"appArmorProfile":          honour(""),
		"seLinuxChangePolicy":      ignore(oneUser),
	},
	typeOf[v1.SecurityContext](): {
		"capabilities":             honour(""),
		"privileged":               reject(noPrivilege, "false"),
		"seLinuxOptions":           reject(noPrivilege),
		"windowsOptions":           reject("the cluster runs Linux"),
		"runAsUser":                honour(subIDs),
		"runAsGroup":               honour(subIDs),
		"runAsNonRoot":             honour(notRoot),
		"readOnlyRootFilesystem":   honour("without it, what a container writes is gone when it restarts"),
		"allowPrivilegeEscalation": honour("only root by runAsUser 0 can have it"),
		"procMount":                reject(noPrivilege, "Default"),
		"seccompProfile":           honour(""),
		"appArmorProfile":          honour(""),
	},
	typeOf[v1.Lifecycle](): {
		"postStart":  honour("the next container starts when it has ended"),
		"preStop":    honour("within the grace period"),
		"stopSignal": honour("the signals that the runtime hands on, which those for job control are not"),
	},
	typeOf[v1.LifecycleHandler](): {"exec": honour(""), "httpGet": honour(""), "tcpSocket": honour("fails, as with a kubelet"), "sleep": honour("")},
	typeOf[v1.SleepAction]():      {"seconds": honour("")},
	typeOf[v1.ContainerRestartRule](): {
		"action":    reject("a job cannot start all containers of a pod again; use Restart", "Restart"),
		"exitCodes": honour(""),
	},
	typeOf[v1.ContainerRestartRuleOnExitCodes](): {"operator": reject("use In or NotIn", "In", "NotIn"), "values": honour("")},
	typeOf[v1.Capabilities]():                    {"add": reject(noPrivilege), "drop": honour("only root by runAsUser 0 has any, and only over what is the pod's")},
	typeOf[v1.SeccompProfile](): {
		"type":             ignore("the cluster's own runtime and kernel policy hold", "Unconfined", "Localhost"), // Localhost: refused by its profile
		"localhostProfile": reject("no profiles can be put on the compute nodes; use RuntimeDefault"),
	},
	typeOf[v1.AppArmorProfile](): {
		"type":             ignore("the cluster's own runtime and kernel policy hold", "Unconfined", "Localhost"),
		"localhostProfile": reject("no profiles can be put on the compute nodes; use RuntimeDefault"),
	},
	typeOf[v1.ResourceRequirements](): {"limits": honour(""), "requests": honour(""), "claims": reject("dynamic resource allocation has no driver on the cluster")},
	typeOf[v1.EnvVar]():               {"name": honour("names that no shell can assign need perl or python3 on the compute node"), "value": honour(""), "valueFrom": honour("")},
	typeOf[v1.EnvVarSource](): {
		"fieldRef":         honour(""),
		"resourceFieldRef": honour(""),
		"configMapKeyRef":  honour(""),
		"secretKeyRef":     honour(""),
		"fileKeyRef":       reject("knoc does not read files of a volume before the container starts"),
	},
	typeOf[v1.VolumeMount](): {
		"name":              honour(""),
		"readOnly":          honour(""),
		"recursiveReadOnly": reject("the runtime cannot make mounts below a mount read-only", "Disabled", "IfPossible"),
		"mountPath":         honour(""),
		"subPath":           honour(inVolume),
		"mountPropagation":  reject("mounts made later do not reach a container", "None"),
		"subPathExpr":       honour(inVolume),
		"bindMountOptions":  reject("the runtime has no such options"),
	},
	typeOf[v1.Volume](): {"name": honour(""), "": honour("the kinds below")},
	typeOf[v1.VolumeSource](): {
		"emptyDir":              honour("a directory of the pod on the cluster, or of the compute node as `slurm-job.knoc.io/scratch-volumes` says"),
		"configMap":             honour(""),
		"secret":                honour(""),
		"downwardAPI":           honour(""),
		"projected":             honour(""),
		"hostPath":              honour("a path of the compute node, where `--host-path` allows it"),
		"gcePersistentDisk":     reject(noVolume),
		"awsElasticBlockStore":  reject(noVolume),
		"gitRepo":               reject(noVolume),
		"nfs":                   honour("where `--volume-path` says where the compute nodes have it"),
		"iscsi":                 reject(noVolume),
		"glusterfs":             reject(noVolume),
		"persistentVolumeClaim": honour("bound to a hostPath, local or nfs volume, where `--volume-path` says where the compute nodes have it"),
		"rbd":                   reject(noVolume),
		"flexVolume":            reject(noVolume),
		"cinder":                reject(noVolume),
		"cephfs":                reject(noVolume),
		"flocker":               reject(noVolume),
		"fc":                    reject(noVolume),
		"azureFile":             reject(noVolume),
		"vsphereVolume":         reject(noVolume),
		"quobyte":               reject(noVolume),
		"azureDisk":             reject(noVolume),
		"photonPersistentDisk":  reject(noVolume),
		"portworxVolume":        reject(noVolume),
		"scaleIO":               reject(noVolume),
		"storageos":             reject(noVolume),
		"csi":                   reject(noVolume),
		"ephemeral":             reject(noVolume),
		"image":                 reject("use an init container of that image, which copies the files into an emptyDir"),
	},
	typeOf[v1.HostPathVolumeSource]():              {"path": honour(""), "type": honour("")},
	typeOf[v1.NFSVolumeSource]():                   {"server": honour(""), "path": honour(""), "readOnly": honour("")},
	typeOf[v1.PersistentVolumeClaimVolumeSource](): {"claimName": honour(""), "readOnly": honour("")},
	typeOf[v1.EmptyDirVolumeSource](): {
		"medium":    honour("Memory is `/dev/shm` of the compute node"),
		"sizeLimit": honour("looked at once a minute; a pod whose volume is larger is evicted"),
		"mode":      ignore(oneUser),
	},
	typeOf[v1.ConfigMapVolumeSource](): {"name": honour(""), "items": honour(""), "defaultMode": honour(""), "optional": honour(""), "defaultUser": ignore(oneUser)},
	typeOf[v1.SecretVolumeSource]():    {"secretName": honour(""), "items": honour(""), "defaultMode": honour(""), "optional": honour(""), "defaultUser": ignore(oneUser)},
	typeOf[v1.ConfigMapProjection]():   {"name": honour(""), "items": honour(""), "optional": honour("")},
	typeOf[v1.SecretProjection]():      {"name": honour(""), "items": honour(""), "optional": honour("")},
	typeOf[v1.KeyToPath]():             {"key": honour(""), "path": honour(""), "mode": honour(""), "user": ignore(oneUser)},
	typeOf[v1.DownwardAPIVolumeSource](): {
		"items": honour(""), "defaultMode": honour(""), "defaultUser": ignore(oneUser),
	},
	typeOf[v1.DownwardAPIProjection](): {"items": honour("")},
	typeOf[v1.DownwardAPIVolumeFile](): {"path": honour(""), "fieldRef": honour(""), "resourceFieldRef": honour(""), "mode": honour(""), "user": ignore(oneUser)},
	typeOf[v1.ProjectedVolumeSource](): {"sources": honour(""), "defaultMode": honour(""), "defaultUser": ignore(oneUser)},
	typeOf[v1.VolumeProjection](): {
		"secret":              honour(""),
		"downwardAPI":         honour(""),
		"configMap":           honour(""),
		"serviceAccountToken": honour(""),
		"clusterTrustBundle":  reject("use a ConfigMap with the certificates"),
		"podCertificate":      reject("use a Secret with the certificate, or a service account token"),
	},
	typeOf[v1.ServiceAccountTokenProjection](): {"audience": honour(""), "expirationSeconds": honour("renewed at 80 % of its life, as under a kubelet"), "path": honour(""), "user": ignore(oneUser)},
}

func init() {
	// The API server allows fewer of them: no ports, probes, hooks, resources.
	fieldRules[typeOf[v1.EphemeralContainerCommon]()] = fieldRules[typeOf[v1.Container]()]
}

// checkPod says what knoc will not do of what a pod asks. The sentences are for
// events: fields without effect, none for what the API server fills in by
// itself. The error is a *refusal that names every field, with its value, that
// cannot be left out. Together they are the promise that nothing of a pod is
// dropped in silence. It looks at the pod alone; what the objects it names hold
// is for stageVolumes and stageEnv.
func checkPod(pod *v1.Pod) (sentences []string, err error) {
	k := checker{}
	pod = asSent(pod, &podMeta{}) // ephemeral containers are no reason to refuse it
	k.identity(pod)
	k.fields("spec", reflect.ValueOf(&pod.Spec).Elem())
	k.texts("metadata.labels", reflect.ValueOf(pod.Labels))
	k.texts("metadata.annotations", reflect.ValueOf(pod.Annotations))
	k.texts("spec", reflect.ValueOf(pod.Spec))
	k.volumes(pod)
	k.checkScratchVolumes(pod)
	k.containers(pod)
	k.hooks(pod)
	k.signals(pod)
	k.messages(pod)
	k.devices(pod)
	k.users(pod)
	k.probes(pod)
	if len(k.refused) > 0 {
		return k.ignored, refuse(k.reason, "%s", strings.Join(k.refused, "; "))
	}
	return k.ignored, nil
}

// checker collects what checkPod finds, in the order of the API's fields.
type checker struct {
	ignored []string
	refused []string
	reason  string // of the first refusal
}

func (k *checker) refuse(reason, format string, args ...any) {
	if text := fmt.Sprintf(format, args...); !slices.Contains(k.refused, text) {
		k.refused = append(k.refused, text)
		if k.reason == "" {
			k.reason = reason
		}
	}
}

// err takes a refusal of somebody else's; nil is fine.
func (k *checker) err(where string, err error) {
	var r *refusal
	if errors.As(err, &r) {
		k.refuse(r.Reason, "%s%s", where, r.Message)
	}
}

// fields follows fieldRules through a struct and all below it.
func (k *checker) fields(at string, v reflect.Value) {
	rules := fieldRules[v.Type()]
	for i := range v.NumField() {
		field, value := v.Type().Field(i), v.Field(i)
		name := jsonName(field)
		r, known := rules[name]
		if field.Anonymous && !known { // LocalObjectReference: its fields stand in the outer object
			k.embedded(at, rules, value)
			continue
		}
		path := at
		if name != "" {
			path = at + "." + name
		}
		if isUnset(v.Type(), value) || r.quiet(value) {
			continue
		}
		said := path
		if text := scalar(value); text != "" {
			said = path + ": " + text
		}
		switch {
		case !known:
			k.refuse(reasonOf(path), "%s is not supported: this version of knoc does not know the field", path)
		case r.How == refused:
			k.refuse(reasonOf(path), "%s is not supported: %s", said, r.Note)
		case r.How == ignored:
			k.ignored = append(k.ignored, fmt.Sprintf("%s is ignored: %s", said, r.Note))
		default:
			k.below(path, value)
		}
	}
}

// embedded checks that the fields of an embedded struct are honoured; they are
// all names.
func (k *checker) embedded(at string, rules map[string]rule, v reflect.Value) {
	for i := range v.NumField() {
		if name := jsonName(v.Type().Field(i)); !v.Field(i).IsZero() && rules[name].How != honoured {
			k.refuse(reasonOf(at), "%s.%s is not supported", at, name)
		}
	}
}

// below goes on to the structs that a field holds and that have rules.
func (k *checker) below(path string, v reflect.Value) {
	switch v.Kind() {
	case reflect.Pointer:
		k.below(path, v.Elem())
	case reflect.Slice:
		for i := range v.Len() {
			k.below(elementPath(path, v.Index(i), i), v.Index(i))
		}
	case reflect.Struct:
		if _, ok := fieldRules[v.Type()]; ok {
			k.fields(path, v)
		}
	}
}

// plainName is text that needs no quotes in a sentence.
var plainName = regexp.MustCompile(`^[A-Za-z0-9._/-]{1,63}$`)

// elementPath names an element of a list by its name where it has one, which is
// how a pod's author looks for it.
func elementPath(path string, v reflect.Value, i int) string {
	if v.Kind() == reflect.Struct {
		if name := v.FieldByName("Name"); name.IsValid() && name.Kind() == reflect.String && plainName.MatchString(name.String()) {
			return fmt.Sprintf("%s[%s]", path, name)
		}
	}
	return fmt.Sprintf("%s[%d]", path, i)
}

// jsonName is a field's name in JSON, "" for the sources embedded in a Volume.
func jsonName(f reflect.StructField) string {
	name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
	return name
}

// isUnset says whether a field of a struct of the type t asks for nothing. An
// empty object asks for nothing either, except where its presence is the
// choice, as in a volume's source.
func isUnset(t reflect.Type, v reflect.Value) bool {
	switch v.Kind() {
	case reflect.Slice, reflect.Map:
		return v.Len() == 0
	case reflect.Pointer:
		choice := t == typeOf[v1.VolumeSource]() || t == typeOf[v1.VolumeProjection]()
		return v.IsNil() || !choice && v.Elem().Kind() == reflect.Struct && v.Elem().IsZero()
	}
	return v.IsZero()
}

// scalar is a value as one would write it in YAML, "" for what is no scalar.
func scalar(v reflect.Value) string {
	if v.Kind() == reflect.Pointer && !v.IsNil() {
		v = v.Elem()
	}
	switch v.Kind() {
	case reflect.String:
		if !plainName.MatchString(v.String()) {
			return strconv.Quote(v.String())
		}
		return v.String()
	case reflect.Bool, reflect.Int32, reflect.Int64:
		return fmt.Sprint(v)
	}
	if q, ok := v.Interface().(resource.Quantity); ok {
		return q.String()
	}
	return ""
}

// reasonOf is the pod's status reason when the field at path is refused.
func reasonOf(path string) string {
	if strings.HasPrefix(path, "spec.volumes[") || strings.Contains(path, ".volumeMounts[") {
		return "UnsupportedVolume"
	}
	return "UnsupportedField"
}

// checkText refuses text with a NUL byte: no shell word, file name or
// environment can carry one. The text is not shown, since it may be a secret.
func checkText(where, text string) error {
	if strings.ContainsRune(text, 0) {
		return refuse("UnsupportedField", "%s holds a NUL byte, which no script, file name or environment can carry", where)
	}
	return nil
}

// texts looks for a NUL byte in every string of a value.
func (k *checker) texts(path string, v reflect.Value) {
	switch v.Kind() {
	case reflect.String:
		k.err("", checkText(path, v.String()))
	case reflect.Pointer:
		if !v.IsNil() {
			k.texts(path, v.Elem())
		}
	case reflect.Slice:
		for i := range v.Len() {
			k.texts(elementPath(path, v.Index(i), i), v.Index(i))
		}
	case reflect.Map:
		for it := v.MapRange(); it.Next(); {
			k.texts(path, it.Key())
			k.texts(path, it.Value())
		}
	case reflect.Struct:
		for i := range v.NumField() {
			f := v.Type().Field(i)
			switch name := jsonName(f); {
			case !f.IsExported():
			case name == "":
				k.texts(path, v.Field(i))
			default:
				k.texts(path+"."+name, v.Field(i))
			}
		}
	}
}

// uidText are the UIDs that can stand in a path and in a job's name.
var uidText = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9-]{0,62}$`)

// identity checks the names that become paths and words on the cluster. The API
// server has done so; the callers of the classic API may not have.
func (k *checker) identity(pod *v1.Pod) {
	name := func(field, value string, problems []string) {
		if len(problems) > 0 {
			k.refuse("InvalidPod", "%s: %q: %s", field, value, strings.Join(problems, ", "))
		}
	}
	name("metadata.namespace", pod.Namespace, validation.IsDNS1123Label(pod.Namespace))
	name("metadata.name", pod.Name, validation.IsDNS1123Subdomain(pod.Name))
	if !uidText.MatchString(string(pod.UID)) {
		k.refuse("InvalidPod", "metadata.uid: %q: must be letters, digits and dashes, as the API server makes them", pod.UID)
	}
	if len(pod.Spec.Containers) == 0 {
		k.refuse("InvalidPod", "spec.containers: the pod has no container")
	}
	seen := map[string]bool{}
	for _, c := range allContainers(pod) {
		name("the name of a container", c.Name, validation.IsDNS1123Label(c.Name))
		if seen[c.Name] {
			k.refuse("InvalidPod", "the name of a container: %q: two containers have it", c.Name)
		}
		seen[c.Name] = true
		if c.Image == "" {
			k.refuse("InvalidPod", "container %s has no image", c.Name)
		}
		if p := c.RestartPolicy; p != nil && *p != v1.ContainerRestartPolicyAlways && *p != v1.ContainerRestartPolicyOnFailure && *p != v1.ContainerRestartPolicyNever {
			k.refuse("InvalidPod", "the restartPolicy of container %s: %q: must be Always, OnFailure or Never", c.Name, *p)
		}
	}
	seen = map[string]bool{}
	for i := range pod.Spec.Volumes {
		v := pod.Spec.Volumes[i].Name
		name("the name of a volume", v, validation.IsDNS1123Label(v))
		if seen[v] {
			k.refuse("InvalidPod", "the name of a volume: %q: two volumes have it", v)
		}
		seen[v] = true
	}
	switch pod.Spec.RestartPolicy {
	case "", v1.RestartPolicyAlways, v1.RestartPolicyOnFailure, v1.RestartPolicyNever:
	default:
		k.refuse("InvalidPod", "spec.restartPolicy: %q: must be Always, OnFailure or Never", pod.Spec.RestartPolicy)
	}
}

// volumes checks the paths, modes and fields that volumes name.
func (k *checker) volumes(pod *v1.Pod) {
	for i := range pod.Spec.Volumes {
		v := &pod.Spec.Volumes[i]
		at := "spec.volumes[" + v.Name + "]: "
		mode := func(m *int32) {
			if m != nil && (*m < 0 || *m > 0o777) {
				k.refuse("UnsupportedVolume", "%sthe mode %#o is not one of 0 to 0777", at, *m)
			}
		}
		items := func(items []v1.KeyToPath) {
			for i := range items {
				k.err(at, checkVolumePath(items[i].Path))
				mode(items[i].Mode)
			}
		}
		downward := func(items []v1.DownwardAPIVolumeFile) {
			for i := range items {
				_, err := downwardText(pod, &items[i], nodeFacts{})
				k.err(at, err)
				k.err(at, checkVolumePath(items[i].Path))
				mode(items[i].Mode)
			}
		}
		if kinds := countSet(reflect.ValueOf(v.VolumeSource)); kinds > 1 {
			k.refuse("InvalidPod", "%sit has %d kinds; a volume has one", at, kinds)
		}
		k.err(at, checkHostVolume(v))
		switch {
		case v.EmptyDir != nil && v.EmptyDir.Medium != v1.StorageMediumDefault && v.EmptyDir.Medium != v1.StorageMediumMemory:
			k.refuse("UnsupportedVolume", "%semptyDir.medium: %q is not supported; use the default", at, v.EmptyDir.Medium)
		case v.ConfigMap != nil:
			mode(v.ConfigMap.DefaultMode)
			items(v.ConfigMap.Items)
		case v.Secret != nil:
			mode(v.Secret.DefaultMode)
			items(v.Secret.Items)
		case v.DownwardAPI != nil:
			mode(v.DownwardAPI.DefaultMode)
			downward(v.DownwardAPI.Items)
		case v.Projected != nil:
			mode(v.Projected.DefaultMode)
			for i := range v.Projected.Sources {
				s := &v.Projected.Sources[i]
				switch {
				case s.ConfigMap != nil:
					items(s.ConfigMap.Items)
				case s.Secret != nil:
					items(s.Secret.Items)
				case s.DownwardAPI != nil:
					downward(s.DownwardAPI.Items)
				case s.ServiceAccountToken != nil:
					k.err(at, checkVolumePath(s.ServiceAccountToken.Path))
				}
				if countSet(reflect.ValueOf(*s)) != 1 {
					k.refuse("InvalidPod", "%sprojected source %d does not have exactly one kind", at, i)
				}
			}
		}
	}
}

// countSet counts the fields of a union that are set.
func countSet(v reflect.Value) (n int) {
	for i := range v.NumField() {
		if !v.Field(i).IsNil() {
			n++
		}
	}
	return n
}

// containers checks all containers of a pod.
func (k *checker) containers(pod *v1.Pod) {
	for _, c := range allContainers(pod) {
		k.container(pod, c)
	}
}

// container checks the mounts, and the parts of the environment that are known
// before any object is read.
func (k *checker) container(pod *v1.Pod, c *v1.Container) {
	_, err := mountsOf(pod, c)
	k.err("", err)
	at := "container " + c.Name + ": env "
	for i := range c.Env {
		e := &c.Env[i]
		k.err("", checkEnvName("env of container "+c.Name, e.Name))
		if e.ValueFrom == nil {
			continue
		}
		if e.ValueFrom.FieldRef != nil {
			_, err := fieldValue(pod, e.ValueFrom.FieldRef)
			k.err(at+e.Name+": ", err)
		}
		if e.ValueFrom.ResourceFieldRef != nil {
			_, err := resourceValue(pod, c, e.ValueFrom.ResourceFieldRef, nodeFacts{})
			k.err(at+e.Name+": ", err)
		}
	}
}
