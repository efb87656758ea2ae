// Package resourcename has the rules for names of extended resources, such as nvidia.com/gpu.
package resourcename

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
)

// The kubelet's rules: IsExtendedResourceName of k8s.io/kubernetes. The name with the
// prefix "requests.", as in quotas, must be a qualified name of k8s.io/apimachinery.
const (
	maxVendor = 253 - len(quotaPrefix)
	maxName   = 63

	quotaPrefix  = "requests."
	nativeDomain = "kubernetes.io/"
)

var (
	vendorForm = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`)
	nameForm   = regexp.MustCompile(`^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$`)
)

// Check returns an error if the kubelet does not accept a resource name.
func Check(name string) error {
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
	case !vendorForm.MatchString(vendor):
		return errors.New("the vendor is not a domain name of lower-case letters, digits, hyphens and dots")
	case len(rest) > maxName:
		return fmt.Errorf("the part after the slash has %d characters, more than %d", len(rest), maxName)
	case !nameForm.MatchString(rest):
		return errors.New("the part after the slash may have letters, digits and - _ . between letters or digits")
	}
	return nil
}
