package knoc

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"sigs.k8s.io/yaml"
)

// Capacities of a node that a provider config names without saying how large it
// is: those of the first KNoC.
const (
	defaultCPUCapacity    = "20"
	defaultMemoryCapacity = "100Gi"
	defaultPodCapacity    = "20"
)

// KNOCConfig is what the first KNoC could be told of a node: how much of it
// Kubernetes may use, as resource quantities.
type KNOCConfig struct {
	CPU    string `json:"cpu,omitempty"`
	Memory string `json:"memory,omitempty"`
	Pods   string `json:"pods,omitempty"`
}

// NodeConfig is one node's entry in the provider config file. What is empty is
// taken from Slurm. It embeds KNOCConfig, so that later fields never break a
// fork's KNOCConfig literal.
type NodeConfig struct {
	KNOCConfig
}

// loadNodeConfig reads a provider config file: JSON or YAML, a map from node
// name to NodeConfig, where the entry "*" gives defaults for all of them. With
// no path, or a file that does not speak of this node, everything is left to Slurm.
func loadNodeConfig(path, node string) (NodeConfig, error) {
	if path == "" {
		return NodeConfig{}, nil
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return NodeConfig{}, fmt.Errorf("provider config: %w", err)
	}
	c, err := parseNodeConfig(data, node)
	if err != nil {
		return NodeConfig{}, fmt.Errorf("provider config %s: %w", path, err)
	}
	return c, nil
}

func parseNodeConfig(data []byte, node string) (NodeConfig, error) {
	text, err := yaml.YAMLToJSONStrict(data)
	if err != nil {
		return NodeConfig{}, fmt.Errorf("neither JSON nor YAML: %s", strings.Join(strings.Fields(err.Error()), " "))
	}
	var entries map[string]json.RawMessage
	if err := json.Unmarshal(text, &entries); err != nil {
		return NodeConfig{}, errors.New(`not a map of node names, such as {"knoc": {"cpu": "20"}}`)
	}
	// Every entry is checked, not only this node's: one file serves many nodes
	// and a mistake should not wait for the next of them to start.
	configs := map[string]NodeConfig{}
	for name, entry := range entries {
		c, err := parseEntry(entry)
		if err != nil {
			return NodeConfig{}, fmt.Errorf("node %q: %w", name, err)
		}
		configs[name] = c
	}
	c, named := configs[node]
	c.KNOCConfig = c.or(configs["*"].KNOCConfig)
	if named {
		c.KNOCConfig = c.or(KNOCConfig{defaultCPUCapacity, defaultMemoryCapacity, defaultPodCapacity})
	}
	return c, nil
}

// parseEntry reads one node's entry and checks its quantities.
func parseEntry(entry []byte) (NodeConfig, error) {
	var c NodeConfig
	d := json.NewDecoder(bytes.NewReader(entry))
	d.DisallowUnknownFields()
	err := d.Decode(&c)
	var wrongType *json.UnmarshalTypeError
	switch {
	case errors.As(err, &wrongType) && wrongType.Field != "":
		field := wrongType.Field[strings.LastIndex(wrongType.Field, ".")+1:]
		return c, fmt.Errorf("%s is a %s where a string belongs: put it in quotes", field, wrongType.Value)
	case errors.As(err, &wrongType):
		return c, fmt.Errorf(`is a %s where a map belongs, such as {"cpu": "20"}`, wrongType.Value)
	case err != nil:
		// encoding/json has no type for this error: json: unknown field "cpus"
		return c, fmt.Errorf("%s; the known ones are cpu, memory, pods", strings.TrimPrefix(err.Error(), "json: "))
	}
	_, err = c.capacity()
	return c, err
}

// or fills what is empty from another config.
func (c KNOCConfig) or(d KNOCConfig) KNOCConfig {
	first := func(a, b string) string {
		if a != "" {
			return a
		}
		return b
	}
	return KNOCConfig{first(c.CPU, d.CPU), first(c.Memory, d.Memory), first(c.Pods, d.Pods)}
}

// capacity are the resources that the config sets.
func (c KNOCConfig) capacity() (v1.ResourceList, error) {
	list := v1.ResourceList{}
	for _, f := range []struct {
		field, value string
		name         v1.ResourceName
	}{
		{"cpu", c.CPU, v1.ResourceCPU},
		{"memory", c.Memory, v1.ResourceMemory},
		{"pods", c.Pods, v1.ResourcePods},
	} {
		if f.value == "" {
			continue
		}
		q, err := resource.ParseQuantity(f.value)
		if err != nil || q.Sign() < 0 {
			return nil, fmt.Errorf("%s %q is no quantity such as 20 or 100Gi", f.field, f.value)
		}
		// The API server takes whole numbers only here (ValidateResourceQuantityValue).
		if f.name == v1.ResourcePods && q.MilliValue()%1000 != 0 {
			return nil, fmt.Errorf("pods %q is no whole number", f.value)
		}
		list[f.name] = q
	}
	return list, nil
}
