package kubelet

import (
	"regexp"
	"strings"
	"testing"
)

func TestCheck(t *testing.T) {
	long := func(n int) string { return strings.Repeat("x", n) }
	domain := func(n int) string { return strings.Repeat("a.", n/2-1) + "aa" }
	for name, tt := range map[string]struct {
		resource, problem string
	}{
		"the usual name":                {"nvidia.com/gpu", ""},
		"a MIG profile":                 {"nvidia.com/mig-1g.10gb.me", ""},
		"upper case after the slash":    {"nvidia.com/GPU_h100.x", ""},
		"a vendor of one letter":        {"a/b", ""},
		"the longest name":              {"nvidia.com/" + long(63), ""},
		"the longest vendor":            {domain(244) + "/gpu", ""},
		"nothing":                       {"", "want VENDOR/NAME"},
		"no slash":                      {"gpu", "want VENDOR/NAME"},
		"no vendor":                     {"/gpu", "not a domain name"},
		"no name":                       {"nvidia.com/", "letters, digits"},
		"two slashes":                   {"nvidia.com/gpu/h100", "more than one slash"},
		"a name too long":               {"nvidia.com/" + long(64), "has 64 characters, more than 63"},
		"a vendor too long":             {domain(246) + "/gpu", "the vendor has 246 characters, more than 244"},
		"upper case in the vendor":      {"NVIDIA.com/gpu", "not a domain name"},
		"an underscore in the vendor":   {"nvi_dia.com/gpu", "not a domain name"},
		"an empty label":                {"nvidia..com/gpu", "not a domain name"},
		"a label that ends in a hyphen": {"nvidia-.com/gpu", "not a domain name"},
		"a plus sign":                   {"nvidia.com/mig-1g.10gb+me", "letters, digits"},
		"a name that ends in a dot":     {"nvidia.com/gpu.", "letters, digits"},
		"a line break":                  {"nvidia.com/gpu\n", "letters, digits"},
		"Kubernetes' own":               {"kubernetes.io/gpu", "reserved for Kubernetes"},
		"a suffix of Kubernetes' own":   {"mykubernetes.io/gpu", "reserved for Kubernetes"},
		"a quota":                       {"requests.nvidia.com/gpu", "for quotas"},
	} {
		t.Run(name, func(t *testing.T) {
			err := CheckResourceName(tt.resource)
			if (err == nil) != (tt.problem == "") || err != nil && !strings.Contains(err.Error(), tt.problem) {
				t.Errorf("%q: %v, want %q", tt.resource, err, tt.problem)
			}
		})
	}
}

// kubeletAccepts is a copy of IsExtendedResourceName of k8s.io/kubernetes v1.36.3, pkg/apis/core/v1/helper, with
// IsQualifiedName of k8s.io/apimachinery.
func kubeletAccepts(name string) bool {
	qualifiedName := regexp.MustCompile(`^([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]$`)
	subdomain := regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`)
	if !strings.Contains(name, "/") || strings.Contains(name, "kubernetes.io/") ||
		strings.HasPrefix(name, "requests.") {
		return false
	}
	parts := strings.Split("requests."+name, "/")
	if len(parts) != 2 {
		return false
	}
	prefix, rest := parts[0], parts[1]
	return prefix != "" && len(prefix) <= 253 && subdomain.MatchString(prefix) &&
		rest != "" && len(rest) <= 63 && qualifiedName.MatchString(rest)
}

func FuzzCheck(f *testing.F) {
	for _, name := range []string{
		"nvidia.com/gpu", "requests.a/b", "kubernetes.io/a", "a/b/c", "A/b", "a./b", "a/b.", "/", "", "a/\n",
		strings.Repeat("a", 245) + "/b", "a/" + strings.Repeat("b", 64),
	} {
		f.Add(name)
	}
	f.Fuzz(func(t *testing.T, name string) {
		if ours, theirs := CheckResourceName(name) == nil, kubeletAccepts(name); ours != theirs {
			t.Errorf("%q: %t, and with the kubelet %t", name, ours, theirs)
		}
	})
}
