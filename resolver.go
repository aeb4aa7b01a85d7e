package knoc

import (
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
)

// resolver is what a pod's containers have in /etc/resolv.conf of their own.
type resolver struct {
	// Node says that what the compute node has comes first: dnsPolicy is not None.
	Node                           bool
	Nameservers, Searches, Options []string
}

// resolverOf is nil for a pod that has the compute node's resolver as it is. The
// cluster's own DNS, which ClusterFirst means, is not reached from there.
func resolverOf(pod *v1.Pod) *resolver {
	none, config := pod.Spec.DNSPolicy == v1.DNSNone, pod.Spec.DNSConfig
	if config == nil || !none && len(config.Nameservers)+len(config.Searches)+len(config.Options) == 0 {
		return nil
	}
	r := &resolver{Node: !none, Nameservers: config.Nameservers, Searches: config.Searches}
	for _, o := range config.Options {
		if text := o.Name; o.Name != "" {
			if o.Value != nil {
				text += ":" + *o.Value
			}
			r.Options = append(r.Options, text)
		}
	}
	return r
}

// ForOptions is a shell's pattern of the node's options that the pod's replace.
func (r *resolver) ForOptions() word {
	var patterns []string
	for _, o := range r.Options {
		name, _, _ := strings.Cut(o, ":")
		if p := string(quote(name)); !slices.Contains(patterns, p) {
			patterns = append(patterns, p, p+":*")
		}
	}
	return word(strings.Join(patterns, " | "))
}
