package resource

import "strings"

// profileName returns the resource name of a MIG profile, with the vendor of base: nvidia.com/mig-1g.10gb. Plus signs
// and commas are invalid in names and become dots, as in NVIDIA's device plugin: 1g.10gb+me is mig-1g.10gb.me.
func profileName(base, profile string) string {
	vendor, _, _ := strings.Cut(base, "/")
	return vendor + "/mig-" + strings.NewReplacer("+", ".", ",", ".").Replace(profile)
}
