package resource

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
)

// The kubelet's rule for the names of extended resources: IsExtendedResourceName of k8s.io/kubernetes, which takes the
// name, with "requests." before it as it is in quotas, for a qualified name of k8s.io/apimachinery.
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

// CheckName tells why the kubelet would not accept a resource name, or nil.
func CheckName(name string) error {
	if err := nameProblem(name); err != nil {
		return fmt.Errorf("resource name %q: %w", name, err)
	}
	return nil
}

func nameProblem(name string) error {
	vendor, rest, ok := strings.Cut(name, "/")
	switch {
	case !ok:
		return errors.New("want VENDOR/NAME, such as nvidia.com/gpu")
	case strings.Contains(rest, "/"):
		return errors.New("has more than one slash")
	case strings.Contains(name, nativeDomain):
		return errors.New("kubernetes.io is for the resources of Kubernetes itself")
	case strings.HasPrefix(name, quotaPrefix):
		return errors.New("begins with requests., which is for quotas")
	case len(vendor) > maxVendor:
		return fmt.Errorf("the vendor has %d characters, and %d are allowed", len(vendor), maxVendor)
	case !vendorForm.MatchString(vendor):
		return errors.New("the vendor is not a domain name of lower-case letters, digits, hyphens and dots")
	case len(rest) > maxName:
		return fmt.Errorf("what is behind the slash has %d characters, and %d are allowed", len(rest), maxName)
	case !nameForm.MatchString(rest):
		return errors.New("what is behind the slash may have letters, digits and - _ . between letters or digits")
	}
	return nil
}

// profileName is the resource name of a MIG profile, beside that of the GPUs: nvidia.com/mig-1g.10gb. A plus sign or a
// comma, which a name cannot have, is a dot, as in NVIDIA's device plugin: 1g.10gb+me is mig-1g.10gb.me.
func profileName(base, profile string) string {
	vendor, _, _ := strings.Cut(base, "/")
	return vendor + "/mig-" + strings.NewReplacer("+", ".", ",", ".").Replace(profile)
}
