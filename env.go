package knoc

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
)

// Facts that only the compute node knows. pod.sh sets these shell variables
// before it starts anything; a valuePart names one of them.
const (
	varPodIP   = "KNOC_POD_IP"
	varPodIPs  = "KNOC_POD_IPS" // comma-separated, as the kubelet gives status.podIPs
	varHostIP  = "KNOC_HOST_IP"
	varHostIPs = "KNOC_HOST_IPS"
)

// valuePart is a piece of a value: either Text, or the value that the shell
// variable Var has on the compute node.
type valuePart struct {
	Text string
	Var  string
	// Secret says that Text comes from a Secret: it may stand in 0600 files and
	// nowhere else. The job script is not such a place, since slurmctld keeps a
	// copy of it and slurmdbd may (AccountingStoreFlags=job_script).
	Secret bool
}

// envVar is one variable of a container's environment, resolved. Names are
// unique within a container.
type envVar struct {
	Name  string
	Value []valuePart
}

// nodeFacts is what the virtual node contributes to a pod's environment.
type nodeFacts struct {
	// Allocatable stands in for a limit that a container does not set, as the
	// API defines resourceFieldRef.
	Allocatable v1.ResourceList
	// Services are those whose variables containers have.
	Services []v1.Service
}

// environment collects variables; a later one of the same name replaces the
// value and keeps the place.
type environment struct {
	vars []envVar
	at   map[string]int
}

func (e *environment) set(name string, value []valuePart) {
	i, ok := e.at[name]
	if !ok {
		i = len(e.vars)
		e.at[name] = i
		e.vars = append(e.vars, envVar{Name: name})
	}
	e.vars[i].Value = value
}

func (e *environment) lookup(name string) ([]valuePart, bool) {
	i, ok := e.at[name]
	if !ok {
		return nil, false
	}
	return e.vars[i].Value, true
}

// stageEnv resolves the environment of one container of the pod. The order and
// the override rules are the API's: envFrom from first to last, then env from
// first to last, a later name replacing an earlier one; $(VAR) in a value sees
// all of envFrom, the env entries above it, and the services, whose variables
// replace none (kubelet: makeEnvironmentVariables in pkg/kubelet/kubelet_pods.go).
//
// The error is a *refusal for what can never work, a *notYet for what may, or
// the context's.
func stageEnv(ctx context.Context, pod *v1.Pod, c *v1.Container, objs objects, node nodeFacts) ([]envVar, error) {
	env, services := environment{at: map[string]int{}}, serviceEnv(node.Services)
	lookup := func(name string) ([]valuePart, bool) {
		if value, ok := env.lookup(name); ok {
			return value, true
		}
		return services.lookup(name)
	}
	for i := range c.EnvFrom {
		data, err := envFromData(ctx, pod, &c.EnvFrom[i], objs)
		if err != nil {
			return nil, err
		}
		for _, key := range slices.Sorted(maps.Keys(data)) {
			name := c.EnvFrom[i].Prefix + key
			if err := checkEnvName(fmt.Sprintf("envFrom of container %s", c.Name), name); err != nil {
				return nil, err
			}
			if err := checkEnvText(c, name, data[key].Text); err != nil {
				return nil, err
			}
			env.set(name, literal(data[key].Text, data[key].Secret))
		}
	}
	for i := range c.Env {
		e := &c.Env[i]
		if err := checkEnvName(fmt.Sprintf("env of container %s", c.Name), e.Name); err != nil {
			return nil, err
		}
		// A value takes precedence over valueFrom, as in the kubelet; the API
		// server admits only one of them.
		if e.Value != "" || e.ValueFrom == nil {
			if err := checkEnvText(c, e.Name, e.Value); err != nil {
				return nil, err
			}
			env.set(e.Name, expand(e.Value, lookup))
			continue
		}
		value, ok, err := valueFrom(ctx, pod, c, e.ValueFrom, objs, node)
		if err != nil {
			return nil, err
		}
		if !ok {
			continue // optional and absent: what envFrom gave stays
		}
		for _, p := range value {
			if err := checkEnvText(c, e.Name, p.Text); err != nil {
				return nil, err
			}
		}
		env.set(e.Name, value)
	}
	for _, v := range services.vars {
		if _, ok := env.lookup(v.Name); !ok {
			env.set(v.Name, v.Value)
		}
	}
	if home, ok := env.lookup(homeVar); ok {
		if err := checkHome(c, home); err != nil {
			return nil, err
		}
	}
	return env.vars, nil
}

// literal is a value of one piece of text, or of none when the text is empty.
func literal(text string, secret bool) []valuePart {
	if text == "" {
		return nil
	}
	return []valuePart{{Text: text, Secret: secret}}
}

// checkEnvName refuses a name that is none in Kubernetes: it allows every printable
// ASCII character but "=" (RelaxedEnvironmentVariableValidation). And those that
// the runtime keeps to itself.
func checkEnvName(where, name string) error {
	if !envName.MatchString(name) {
		return refuse("UnsupportedField", "%s: the variable name %q is none: it may have printable ASCII characters other than \"=\"", where, name)
	}
	if runtimesOwn.MatchString(name) || !isShellName(name) && strings.HasPrefix(name, "APPTAINER") || !isShellName(name) && strings.HasPrefix(name, "SINGULARITY") {
		return refuse("UnsupportedField", "%s: the container runtime keeps the variable %s to itself; use another name", where, name)
	}
	return nil
}

// checkEnvText refuses what the environment of a process cannot hold, and waits
// where a kubelet's runtime would: it takes UTF-8 only, and so does Apptainer, which
// would replace other bytes.
func checkEnvText(c *v1.Container, name, text string) error {
	where := fmt.Sprintf("env of container %s: the value of %s", c.Name, name)
	if err := checkText(where, text); err != nil {
		return err
	}
	if !utf8.ValidString(text) {
		return waitFor("CreateContainerError", "%s is not valid UTF-8; mount it as a file instead", where)
	}
	return nil
}

// checkHome refuses a home directory that the runtime cannot be told.
func checkHome(c *v1.Container, value []valuePart) error {
	text := textOf(value)
	if !strings.HasPrefix(text, "/") || strings.ContainsAny(text, ":\n") {
		return refuse("UnsupportedField", "env of container %s: HOME must be an absolute path without a colon: the runtime takes no other", c.Name)
	}
	return nil
}

// configError is a container's waiting reason for an object that cannot be read
// now, with the kubelet's words for one that does not exist.
func configError(ctx context.Context, kind, name string, err error) error {
	return notYetFor(ctx, "CreateContainerConfigError", "", kind, name, err)
}

// notYetFor turns the error of reading an object into a *notYet. The kubelet
// writes `configmap "x" not found` where the API server writes `configmaps "x"
// not found`.
func notYetFor(ctx context.Context, reason, prefix, kind, name string, err error) error {
	var refused *refusal
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.As(err, &refused):
		return err
	case apierrors.IsNotFound(err) && kind != "":
		return waitFor(reason, "%s%s %q not found", prefix, kind, name)
	}
	return waitFor(reason, "%s%v", prefix, err)
}

// envFromData reads the keys of one envFrom source; nil for one that is
// optional and absent. Of a ConfigMap only data counts, not binaryData.
func envFromData(ctx context.Context, pod *v1.Pod, from *v1.EnvFromSource, objs objects) (map[string]valuePart, error) {
	data := map[string]valuePart{}
	switch {
	case from.ConfigMapRef != nil:
		ref := from.ConfigMapRef
		cm, err := objs.ConfigMap(ctx, pod.Namespace, ref.Name)
		if err != nil {
			if isTrue(ref.Optional) && apierrors.IsNotFound(err) {
				return nil, nil
			}
			return nil, configError(ctx, "configmap", ref.Name, err)
		}
		for k, v := range cm.Data {
			data[k] = valuePart{Text: v}
		}
	case from.SecretRef != nil:
		ref := from.SecretRef
		s, err := objs.Secret(ctx, pod.Namespace, ref.Name)
		if err != nil {
			if isTrue(ref.Optional) && apierrors.IsNotFound(err) {
				return nil, nil
			}
			return nil, configError(ctx, "secret", ref.Name, err)
		}
		for k, v := range s.Data {
			data[k] = valuePart{Text: string(v), Secret: true}
		}
	}
	return data, nil
}

// valueFrom resolves one source; false for one that is optional and absent.
func valueFrom(ctx context.Context, pod *v1.Pod, c *v1.Container, from *v1.EnvVarSource, objs objects, node nodeFacts) ([]valuePart, bool, error) {
	switch {
	case from.FieldRef != nil:
		part, err := fieldValue(pod, from.FieldRef)
		if err != nil {
			return nil, false, err
		}
		if part.Var == "" {
			return literal(part.Text, false), true, nil
		}
		return []valuePart{part}, true, nil
	case from.ResourceFieldRef != nil:
		text, err := resourceValue(pod, c, from.ResourceFieldRef, node)
		return literal(text, false), err == nil, err
	case from.ConfigMapKeyRef != nil:
		ref := from.ConfigMapKeyRef
		cm, err := objs.ConfigMap(ctx, pod.Namespace, ref.Name)
		if err != nil {
			if isTrue(ref.Optional) && apierrors.IsNotFound(err) {
				return nil, false, nil
			}
			return nil, false, configError(ctx, "configmap", ref.Name, err)
		}
		text, ok := cm.Data[ref.Key]
		if !ok && !isTrue(ref.Optional) {
			return nil, false, waitFor("CreateContainerConfigError", "couldn't find key %s in ConfigMap %s/%s", ref.Key, pod.Namespace, ref.Name)
		}
		return literal(text, false), ok, nil
	case from.SecretKeyRef != nil:
		ref := from.SecretKeyRef
		s, err := objs.Secret(ctx, pod.Namespace, ref.Name)
		if err != nil {
			if isTrue(ref.Optional) && apierrors.IsNotFound(err) {
				return nil, false, nil
			}
			return nil, false, configError(ctx, "secret", ref.Name, err)
		}
		data, ok := s.Data[ref.Key]
		if !ok && !isTrue(ref.Optional) {
			return nil, false, waitFor("CreateContainerConfigError", "couldn't find key %s in Secret %s/%s", ref.Key, pod.Namespace, ref.Name)
		}
		return literal(string(data), true), ok, nil
	case from.FileKeyRef != nil:
		return nil, false, refuse("UnsupportedField", "env of container %s: valueFrom.fileKeyRef is not supported: knoc does not read files of a volume before the container starts", c.Name)
	}
	return nil, true, nil // an empty valueFrom gives an empty value, as in the kubelet
}

func isTrue(b *bool) bool { return b != nil && *b }

// fieldValue is the value of a fieldRef: the paths that the API server admits
// in an environment or a downwardAPI volume (validation.go:
// validEnvDownwardAPIFieldPathExpressions and its two neighbours).
func fieldValue(pod *v1.Pod, ref *v1.ObjectFieldSelector) (valuePart, error) {
	text := func(s string) (valuePart, error) { return valuePart{Text: s}, nil }
	if ref.APIVersion != "" && ref.APIVersion != "v1" {
		return valuePart{}, refuse("UnsupportedField", "fieldRef: apiVersion %q is not supported; use v1", ref.APIVersion)
	}
	switch ref.FieldPath {
	case "metadata.name":
		return text(pod.Name)
	case "metadata.namespace":
		return text(pod.Namespace)
	case "metadata.uid":
		return text(string(pod.UID))
	case "metadata.labels":
		return text(formatMap(pod.Labels))
	case "metadata.annotations":
		return text(formatMap(pod.Annotations))
	case "spec.nodeName":
		return text(pod.Spec.NodeName)
	case "spec.serviceAccountName":
		return text(pod.Spec.ServiceAccountName)
	case "status.podIP":
		return valuePart{Var: varPodIP}, nil
	case "status.podIPs":
		return valuePart{Var: varPodIPs}, nil
	case "status.hostIP":
		return valuePart{Var: varHostIP}, nil
	case "status.hostIPs":
		return valuePart{Var: varHostIPs}, nil
	}
	if key, ok := subscript(ref.FieldPath, "metadata.labels"); ok {
		return text(pod.Labels[key])
	}
	if key, ok := subscript(ref.FieldPath, "metadata.annotations"); ok {
		return text(pod.Annotations[key])
	}
	return valuePart{}, refuse("UnsupportedField", "fieldRef: fieldPath %q is not one of the API's: metadata.name, metadata.namespace, metadata.uid, metadata.labels, metadata.annotations (whole or ['key']), spec.nodeName, spec.serviceAccountName, status.hostIP, status.hostIPs, status.podIP, status.podIPs", ref.FieldPath)
}

// subscript reads KEY out of PATH['KEY'].
func subscript(fieldPath, path string) (string, bool) {
	rest, ok := strings.CutPrefix(fieldPath, path+"['")
	if !ok {
		return "", false
	}
	return strings.CutSuffix(rest, "']")
}

// formatMap writes labels or annotations as the downward API does: sorted lines
// of key="value", the value escaped as in Go, without a newline at the end.
func formatMap(m map[string]string) string {
	var lines []string
	for _, k := range slices.Sorted(maps.Keys(m)) {
		lines = append(lines, k+"="+strconv.Quote(m[k]))
	}
	return strings.Join(lines, "\n")
}

// resourceValue is the value of a resourceFieldRef of the container that it
// names, else of c: the quantity divided by the divisor, rounded up. A limit
// that is not set is the node's allocatable, except for huge pages, which are
// never overcommitted (kubelet: defaultPodLimitsForDownwardAPI).
func resourceValue(pod *v1.Pod, c *v1.Container, ref *v1.ResourceFieldSelector, node nodeFacts) (string, error) {
	if ref.ContainerName != "" {
		if c = containerOf(pod, ref.ContainerName); c == nil {
			return "", refuse("UnsupportedField", "resourceFieldRef: the pod has no container %q", ref.ContainerName)
		}
	}
	if c == nil {
		return "", refuse("UnsupportedField", "resourceFieldRef: containerName is required in a volume")
	}
	kind, name, _ := strings.Cut(ref.Resource, ".")
	res := v1.ResourceName(name)
	huge := strings.HasPrefix(name, v1.ResourceHugePagesPrefix)
	var quantity resource.Quantity
	switch {
	case !huge && res != v1.ResourceCPU && res != v1.ResourceMemory && res != v1.ResourceEphemeralStorage,
		kind != "limits" && kind != "requests":
		return "", refuse("UnsupportedField", "resourceFieldRef: resource %q is not one of the API's: limits or requests of cpu, memory, ephemeral-storage, hugepages-*", ref.Resource)
	case kind == "requests":
		quantity = c.Resources.Requests[res]
	default:
		quantity = c.Resources.Limits[res]
		if quantity.IsZero() && !huge {
			quantity = node.Allocatable[res]
		}
	}
	divisor := ref.Divisor
	if divisor.IsZero() {
		divisor = resource.MustParse("1")
	}
	value, by := quantity.Value(), divisor.Value()
	if res == v1.ResourceCPU {
		value, by = quantity.MilliValue(), divisor.MilliValue()
	}
	if by <= 0 {
		return "", refuse("UnsupportedField", "resourceFieldRef: the divisor %s of %s is not positive", divisor.String(), ref.Resource)
	}
	n := value / by
	if value%by > 0 {
		n++
	}
	return strconv.FormatInt(n, 10), nil
}

// containerOf finds a container of the pod by name, init containers included.
func containerOf(pod *v1.Pod, name string) *v1.Container {
	for i := range pod.Spec.Containers {
		if pod.Spec.Containers[i].Name == name {
			return &pod.Spec.Containers[i]
		}
	}
	for i := range pod.Spec.InitContainers {
		if pod.Spec.InitContainers[i].Name == name {
			return &pod.Spec.InitContainers[i]
		}
	}
	return nil
}

// expand replaces $(NAME) by the parts that lookup has for it. As in Kubernetes
// a reference to an unknown name stays as it is written, $$ is one $, so that
// $$(NAME) gives $(NAME), and any other $ stands for itself. What a name brings
// in is not expanded again.
func expand(s string, lookup func(name string) ([]valuePart, bool)) []valuePart {
	var parts []valuePart
	add := func(p valuePart) {
		last := len(parts) - 1
		switch {
		case p.Var == "" && p.Text == "":
		case last >= 0 && p.Var == "" && parts[last].Var == "" && parts[last].Secret == p.Secret:
			parts[last].Text += p.Text
		default:
			parts = append(parts, p)
		}
	}
	for {
		i := strings.IndexByte(s, '$')
		if i < 0 || i+1 == len(s) {
			add(valuePart{Text: s})
			return parts
		}
		add(valuePart{Text: s[:i]})
		s = s[i:]
		end := strings.IndexByte(s, ')')
		switch {
		case s[1] == '$':
			add(valuePart{Text: "$"})
			s = s[2:]
		case s[1] == '(' && end > 0:
			value, ok := lookup(s[2:end])
			if !ok {
				value = []valuePart{{Text: s[:end+1]}}
			}
			for _, p := range value {
				add(p)
			}
			s = s[end+1:]
		default: // not a reference, or one without an end: two bytes as they are
			add(valuePart{Text: s[:2]})
			s = s[2:]
		}
	}
}
