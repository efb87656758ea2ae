package kubelet

import (
	"errors"
	"fmt"
	"strings"
)

// The kubelet's rules are those of IsExtendedResourceName in k8s.io/kubernetes. Quotas put "requests." before a name,
// and with that prefix it must still be a qualified name of k8s.io/apimachinery.
const (
	maxVendor = 253 - len(quotaPrefix)
	maxName   = 63

	quotaPrefix  = "requests."
	nativeDomain = "kubernetes.io/"
)

const (
	lower  = "abcdefghijklmnopqrstuvwxyz"
	upper  = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
	digits = "0123456789"
)

// IsSubdomain reports whether a text consists of labels separated by dots. It does not check the length.
func IsSubdomain(text string) bool {
	for label := range strings.SplitSeq(text, ".") {
		if !IsLabel(label) {
			return false
		}
	}
	return true
}

// IsLabel reports whether a text consists of lower-case letters, digits, and hyphens that are neither first nor last.
// It does not check the length.
func IsLabel(text string) bool { return isName(text, lower+digits, "-") }

// IsName reports whether a text consists of letters, digits, and - _ . that are neither first nor last. It does not
// check the length.
func IsName(text string) bool { return isName(text, lower+upper+digits, "-_.") }

// isName reports whether a text begins and ends with one of `these` characters, and otherwise consists of these and
// `others`.
func isName(text, these, others string) bool {
	return text != "" && strings.Trim(text, these+others) == "" &&
		strings.IndexByte(these, text[0]) >= 0 && strings.IndexByte(these, text[len(text)-1]) >= 0
}

// CheckResourceName returns an error if the kubelet does not accept a resource name.
func CheckResourceName(name string) error {
	if err := problem(name); err != nil {
		return fmt.Errorf("resource name %q: %w", name, err)
	}
	return nil
}

func problem(name string) error {
	vendor, rest, ok := strings.Cut(name, "/")
	switch {
	case !ok:
		return errors.New("want VENDOR/NAME, such as nvidia.com/gpu")
	case strings.Contains(rest, "/"):
		return errors.New("has more than one slash")
	case strings.Contains(name, nativeDomain):
		return errors.New("kubernetes.io is reserved for Kubernetes")
	case strings.HasPrefix(name, quotaPrefix):
		return errors.New("the prefix requests. is reserved for quotas")
	case len(vendor) > maxVendor:
		return fmt.Errorf("the vendor has %d characters, more than %d", len(vendor), maxVendor)
	case !IsSubdomain(vendor):
		return errors.New("the vendor is not a domain name of lower-case letters, digits, hyphens and dots")
	case len(rest) > maxName:
		return fmt.Errorf("the part after the slash has %d characters, more than %d", len(rest), maxName)
	case !IsName(rest):
		return errors.New("the part after the slash may have letters, digits and - _ . between letters or digits")
	}
	return nil
}

// IsPrefixedNative reports whether a resource is one of Kubernetes' own with a domain, such as the old name of GPUs,
// alpha.kubernetes.io/nvidia-gpu. No device plugin can offer it.
func IsPrefixedNative(name string) bool { return strings.Contains(name, nativeDomain) }
