package knoc

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// The API server's own service, which every pod is told of.
const masterService = "kubernetes"

// podServices are the services whose variables the pod's containers have: those of
// its namespace, unless it does not want them, and the API server (kubelet:
// getServiceEnvVarMap). The sentence says why there are none, if knoc may not
// read them: a container that does not need them must not wait for that.
func (p *KNOCProvider) podServices(ctx context.Context, pod *v1.Pod) (list []v1.Service, sentence string, err error) {
	read := func(namespace, name string) error {
		found, err := p.objs.Services(ctx, namespace, name)
		switch {
		case apierrors.IsForbidden(err):
			sentence = fmt.Sprintf("spec.enableServiceLinks: the containers do not have the variables of services: %v", err)
			return nil
		case err != nil:
			return configError(ctx, "", "", err)
		}
		list = append(list, found...)
		return nil
	}
	if pod.Spec.EnableServiceLinks == nil || *pod.Spec.EnableServiceLinks { // SetDefaults_PodSpec
		if err := read(pod.Namespace, ""); err != nil {
			return nil, "", err
		}
	}
	list = slices.DeleteFunc(slices.Clone(list), func(s v1.Service) bool {
		return s.Name == masterService && (s.Namespace == metav1.NamespaceDefault || p.cfg.APIServerForPods != "")
	})
	if p.cfg.APIServerForPods != "" {
		api, err := apiServerForPods(p.cfg.APIServerForPods)
		if err != nil {
			return nil, "", err // it was checked at the start
		}
		return append(list, api), sentence, nil
	}
	if err := read(metav1.NamespaceDefault, masterService); err != nil {
		return nil, "", err
	}
	return list, sentence, nil
}

// apiServerForPods is the API server's service at another address than the
// cluster's own, which compute nodes cannot reach as a rule.
func apiServerForPods(address string) (v1.Service, error) {
	host, port := address, "443"
	if h, p, err := net.SplitHostPort(address); err == nil {
		host, port = h, p
	} else if inner, ok := strings.CutPrefix(address, "["); ok {
		host = strings.TrimSuffix(inner, "]")
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 || !plainText.MatchString(strings.ReplaceAll(host, ":", "")) || strings.Contains(host, "/") {
		return v1.Service{}, fmt.Errorf("--api-server-for-pods %q: write host or host:port, without https://", address)
	}
	return v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: masterService},
		Spec:       v1.ServiceSpec{ClusterIP: host, Ports: []v1.ServicePort{{Name: "https", Protocol: v1.ProtocolTCP, Port: int32(n)}}},
	}, nil
}

// serviceEnv are the variables of services, as Docker's links had them (kubelet:
// pkg/kubelet/envvars). Of two services whose names give the same variable, the
// last one by name has it.
func serviceEnv(services []v1.Service) *environment {
	env := &environment{at: map[string]int{}}
	services = slices.SortedFunc(slices.Values(services), func(a, b v1.Service) int { return cmp.Compare(a.Name, b.Name) })
	variable := func(s string) string { return strings.ToUpper(strings.ReplaceAll(s, "-", "_")) }
	for i := range services {
		s := &services[i].Spec
		if s.ClusterIP == "" || s.ClusterIP == v1.ClusterIPNone || s.Type == v1.ServiceTypeExternalName || len(s.Ports) == 0 {
			continue
		}
		name := variable(services[i].Name)
		set := func(suffix, value string) { env.set(name+suffix, literal(value, false)) }
		set("_SERVICE_HOST", s.ClusterIP)
		set("_SERVICE_PORT", strconv.Itoa(int(s.Ports[0].Port)))
		for _, port := range s.Ports {
			if port.Name != "" {
				set("_SERVICE_PORT_"+variable(port.Name), strconv.Itoa(int(port.Port)))
			}
		}
		for i, port := range s.Ports {
			protocol := string(cmp.Or(port.Protocol, v1.ProtocolTCP))
			number := strconv.Itoa(int(port.Port))
			url := strings.ToLower(protocol) + "://" + net.JoinHostPort(s.ClusterIP, number)
			if i == 0 {
				set("_PORT", url)
			}
			prefix := "_PORT_" + number + "_" + protocol
			set(prefix, url)
			set(prefix+"_PROTO", strings.ToLower(protocol))
			set(prefix+"_PORT", number)
			set(prefix+"_ADDR", s.ClusterIP)
		}
	}
	return env
}

// serviceCache keeps lists of services for a moment, so that a burst of pods asks
// once. A kubelet's own list is behind by as much.
type serviceCache struct {
	mu    sync.Mutex
	lists map[string]cachedServices
}

type cachedServices struct {
	list []v1.Service
	err  error
	at   time.Time
}

func (c *serviceCache) get(key string, read func() ([]v1.Service, error)) ([]v1.Service, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	if l, ok := c.lists[key]; ok && now.Sub(l.at) < time.Second {
		return l.list, l.err
	}
	list, err := read()
	if c.lists == nil || len(c.lists) > 100 {
		c.lists = map[string]cachedServices{}
	}
	c.lists[key] = cachedServices{list, err, now}
	return list, err
}
