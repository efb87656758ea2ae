// Package pod parses manifests of pods. From a v1.Pod it reads what the device manager needs: the names, the UID, and
// how many devices of extended resources each container requests.
//
// Unknown fields are errors in the pod, its metadata, its spec, its containers and their resources. Known fields that
// have no effect here may have any content.
package pod

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strings"
	"sync"

	"go.yaml.in/yaml/v3"

	"gpu-cdi-plugin/internal/kubelet"
	"gpu-cdi-plugin/internal/wording"
	"gpu-cdi-plugin/internal/yamlfile"
	"gpu-cdi-plugin/manager/model"
	"gpu-cdi-plugin/manager/quantity"
)

// MaxSize is the size of the largest manifest in bytes, for the command line and the API.
const MaxSize = 256 << 10

var (
	// ErrInvalid means that a manifest does not describe a pod that can be admitted.
	ErrInvalid = errors.New("invalid pod manifest")
	// ErrTooLarge means that a manifest is larger than MaxSize. It wraps ErrInvalid.
	ErrTooLarge = fmt.Errorf("%w: it is larger than %d KiB", ErrInvalid, MaxSize>>10)
)

// Parse parses the manifest of one pod in YAML or JSON. The error is ErrTooLarge, or it wraps ErrInvalid and has the
// first problems.
//
// The default namespace is "default". If a pod has no UID, its UID is derived from its namespace and name, so that the
// same manifest is always the same pod, like a static pod of the kubelet. Limits of devices must be whole numbers. If
// there are requests for devices, they must equal the limits. Limits of other resources, such as cpu, are checked and
// ignored.
func Parse(data []byte) (model.Pod, error) {
	if len(data) > MaxSize {
		return model.Pod{}, ErrTooLarge
	}
	p, err := parse(data)
	if err != nil {
		return model.Pod{}, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	return p, nil
}

func parse(data []byte) (model.Pod, error) {
	if json.Valid(data) {
		data = yamlOf(data)
	}
	document, err := yamlfile.Parse(data)
	if err != nil {
		return model.Pod{}, err
	}
	if err := checkKind(document); err != nil {
		return model.Pod{}, err
	}
	var m manifest
	if _, err := yamlfile.Decode(data, &m, nil); err != nil {
		return model.Pod{}, err
	}
	c := converter{}
	p := c.pod(m)
	return p, wording.Limit(errors.Join(c.problems...))
}

// checkKind returns an error if the document is another kind of object that people try to admit. The error says what
// to do instead.
func checkKind(document *yaml.Node) error {
	var head struct {
		Kind string `yaml:"kind"`
	}
	if err := document.Decode(&head); err != nil {
		return nil //nolint:nilerr // the whole manifest is decoded next, with better errors
	}
	switch head.Kind {
	case "List", "PodList":
		return fmt.Errorf("kind %s: admit its pods one by one", head.Kind)
	case "PodTemplate":
		return fmt.Errorf("kind %s: admit its template as a pod: kind Pod, with a name, and the template's spec", head.Kind)
	case "Job", "CronJob", "Deployment", "ReplicaSet", "StatefulSet", "DaemonSet", "ReplicationController":
		return fmt.Errorf("kind %s: only a cluster makes pods of it: admit a pod with the spec of its template "+
			"(spec.template.spec), kind Pod and a name", head.Kind)
	}
	return nil
}

// escaped matches the escapes in JSON strings: those that YAML does not have (an escaped slash, a surrogate pair) as a
// whole, and of all others the beginning.
var escaped = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`\\(u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|.)`)
})

// yamlOf converts valid JSON to YAML. In YAML there may be no tabs between values.
func yamlOf(data []byte) []byte {
	data = bytes.ReplaceAll(data, []byte{'\t'}, []byte{' '}) // tabs in strings are escaped
	return escaped().ReplaceAllFunc(data, func(match []byte) []byte {
		if len(match) == 2 && match[1] != '/' {
			return match
		}
		var text string
		_ = json.Unmarshal(slices.Concat([]byte{'"'}, match, []byte{'"'}), &text) // the match is valid
		return []byte(text)
	})
}

// converter converts a manifest to a pod and collects problems.
type converter struct {
	problems []error
}

func (c *converter) problem(path, format string, args ...any) {
	c.problems = append(c.problems, fmt.Errorf("%s: %w", path, fmt.Errorf(format, args...)))
}

func (c *converter) pod(m manifest) model.Pod {
	c.claims("spec.resourceClaims", m.Spec.ResourceClaims)
	if m.Metadata.GenerateName != "" && m.Metadata.Name == "" {
		c.problem("metadata.generateName", "only an API server makes a name of it: write metadata.name")
	}
	c.oneOf("apiVersion", m.APIVersion, "v1")
	c.oneOf("kind", m.Kind, "Pod")
	c.oneOf("spec.restartPolicy", m.Spec.RestartPolicy, "", "Always", "OnFailure", "Never")
	p := model.Pod{UID: m.Metadata.UID, Namespace: m.Metadata.Namespace, Name: m.Metadata.Name}
	if p.Namespace == "" {
		p.Namespace = "default"
	}
	if p.UID == "" {
		p.UID = uidOf(p.Namespace, p.Name)
	}
	c.name("metadata.name", p.Name, subdomain, 253)
	c.name("metadata.namespace", p.Namespace, label, 63)
	c.name("metadata.uid", p.UID, identifier, model.MaxUID)
	c.noDevices("spec.resources", "the pod", c.devices("spec.resources", m.Spec.Resources))
	c.noDevices("spec.overhead", "the overhead", c.quantities("spec.overhead", m.Spec.Overhead))
	for i, each := range m.Spec.EphemeralContainers {
		at := fmt.Sprintf("spec.ephemeralContainers[%d].resources", i)
		c.noDevices(at, "an ephemeral container", c.devices(at, each.Resources))
	}
	names := map[string]bool{}
	p.InitContainers = c.containers("spec.initContainers", m.Spec.InitContainers, names)
	p.Containers = c.containers("spec.containers", m.Spec.Containers, names)
	for i := range p.InitContainers {
		p.InitContainers[i].Sidecar = m.Spec.InitContainers[i].RestartPolicy == "Always"
	}
	if len(p.Containers) == 0 {
		c.problem("spec.containers", "want at least one container")
	}
	return p
}

// containers converts a list of containers. `used` has the names that other containers have.
func (c *converter) containers(path string, list []container, used map[string]bool) []model.Container {
	var converted []model.Container
	for i, each := range list {
		at := fmt.Sprintf("%s[%d]", path, i)
		c.name(at+".name", each.Name, label, 63)
		c.oneOf(at+".restartPolicy", each.RestartPolicy, "", "Always", "OnFailure", "Never")
		if used[each.Name] && each.Name != "" {
			c.problem(at+".name", "another container also has the name %q", each.Name)
		}
		used[each.Name] = true
		limits := c.devices(at+".resources", each.Resources)
		converted = append(converted, model.Container{Name: each.Name, Limits: limits})
	}
	return converted
}

// claims refuses claims, with which devices are requested of the scheduler instead of the kubelet's device manager.
func (c *converter) claims(path string, list []any) {
	if len(list) > 0 {
		c.problem(path, "the device manager has no dynamic resource allocation: request devices as limits")
	}
}

// noDevices refuses requests for devices that no container would get.
func (c *converter) noDevices(path, what string, devices map[string]int) {
	for _, name := range slices.Sorted(maps.Keys(devices)) {
		c.problem(path, "only containers and init containers can have devices, but %s requests %s", what, name)
	}
}

// devices returns the limits of extended resources.
func (c *converter) devices(path string, r resources) map[string]int {
	c.claims(path+".claims", r.Claims)
	limits, requests := c.quantities(path+".limits", r.Limits), c.quantities(path+".requests", r.Requests)
	for _, name := range slices.Sorted(maps.Keys(requests)) {
		if n, ok := limits[name]; !ok {
			c.problem(path+".requests."+name, "devices need a limit too")
		} else if n != requests[name] {
			c.problem(path+".requests."+name, "want the limit, %d, got %d", n, requests[name])
		}
	}
	return limits
}

// quantities returns the numbers of devices in a list of quantities. Other resources are left out.
func (c *converter) quantities(path string, list map[string]string) map[string]int {
	var devices map[string]int
	for _, name := range slices.Sorted(maps.Keys(list)) {
		at := path + "." + name
		q, err := quantity.Parse(list[name])
		if err != nil {
			c.problem(at, "%q: %w", list[name], err)
			continue
		}
		extended, err := isExtended(name)
		n, whole := q.Whole()
		switch {
		case err != nil:
			c.problem(path, "%w", err)
		case q.Sign() < 0:
			c.problem(at, "want 0 or more, got %s", list[name])
		case !extended:
		case !whole || n > math.MaxInt32: // more devices than any plugin can list
			c.problem(at, "want a whole number up to %d, got %s", math.MaxInt32, list[name])
		default:
			if devices == nil {
				devices = map[string]int{}
			}
			devices[name] = int(n)
		}
	}
	return devices
}

// isExtended reports whether a name is that of an extended resource. It returns an error if no resource can have the
// name.
func isExtended(name string) (bool, error) {
	native := []string{"cpu", "memory", "ephemeral-storage"}
	switch err := kubelet.CheckResourceName(name); {
	case slices.Contains(native, name), strings.HasPrefix(name, "hugepages-"):
		return false, nil
	case err == nil:
		return true, nil
	case kubelet.IsPrefixedNative(name):
		return true, nil // such as the old name of GPUs, alpha.kubernetes.io/nvidia-gpu: no plugin can offer it
	default:
		return false, fmt.Errorf("%w%s", err, wording.Question(name, native))
	}
}

// oneOf checks that a text is one of the values. An empty text means the first.
func (c *converter) oneOf(path, text string, values ...string) {
	if !slices.Contains(values, text) {
		known := slices.DeleteFunc(slices.Clone(values), func(v string) bool { return v == "" })
		c.problem(path, "want %s, got %q%s", strings.Join(known, " or "), text, wording.Question(text, known))
	}
}

// form is the syntax of a name in Kubernetes, or of a UID: for a static pod, the manifest can set the UID.
type form struct {
	has  func(string) bool
	text string
}

var (
	label      = form{kubelet.IsLabel, "lower-case letters and digits, and hyphens between them"}
	subdomain  = form{kubelet.IsSubdomain, "lower-case letters and digits, and hyphens or dots between them"}
	identifier = form{isIdentifier, "a letter or digit, and then letters, digits, hyphens, underscores or dots"}
)

func isIdentifier(text string) bool { return text != "" && kubelet.IsName(text+"0") }

func (c *converter) name(path, name string, form form, longest int) {
	switch {
	case name == "":
		c.problem(path, "it is missing")
	case len(name) > longest:
		c.problem(path, "it has %d characters, more than %d", len(name), longest)
	case !form.has(name):
		c.problem(path, "want %s, got %q", form.text, name)
	}
}

// uidOf returns a UUID of version 8 (RFC 9562), which is a hash of a pod's namespace and name.
func uidOf(namespace, name string) string {
	h := sha256.Sum256([]byte(namespace + "/" + name))
	h[6] = h[6]&0x0f | 0x80
	h[8] = h[8]&0x3f | 0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", h[:4], h[4:6], h[6:8], h[8:10], h[10:16])
}
