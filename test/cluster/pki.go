package cluster

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"time"
)

// authority issues the certificates of a cluster: all have the same validity, and are for clients and servers.
type authority struct {
	cert *x509.Certificate
	key  crypto.Signer
	pem  string
}

// credentials are a certificate and its key as PEM.
type credentials struct{ cert, key string }

func newAuthority() (*authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	a := &authority{cert: template("cluster"), key: key}
	a.cert.IsCA, a.cert.KeyUsage = true, a.cert.KeyUsage|x509.KeyUsageCertSign
	der, err := x509.CreateCertificate(rand.Reader, a.cert, a.cert, key.Public(), key)
	if err != nil {
		return nil, err
	}
	a.pem = encode("CERTIFICATE", der)
	a.cert, err = x509.ParseCertificate(der)
	return a, err
}

// issue issues a certificate for a user and its group, or for a server at some addresses.
func (a *authority) issue(user, group string, addresses ...string) (credentials, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return credentials{}, err
	}
	cert := template(user)
	cert.Subject = pkix.Name{CommonName: user, Organization: []string{group}} //nolint:misspell // the field's name
	for _, address := range addresses {
		cert.IPAddresses = append(cert.IPAddresses, net.ParseIP(address))
	}
	der, err := x509.CreateCertificate(rand.Reader, cert, a.cert, key.Public(), a.key)
	if err != nil {
		return credentials{}, err
	}
	private, err := x509.MarshalECPrivateKey(key)
	return credentials{encode("CERTIFICATE", der), encode("EC PRIVATE KEY", private)}, err
}

func template(name string) *x509.Certificate {
	serial, _ := rand.Int(rand.Reader, big.NewInt(1<<62)) // it reports no errors
	return &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(30 * 24 * time.Hour),
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
		BasicConstraintsValid: true,
	}
}

func encode(kind string, der []byte) string {
	return string(pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}))
}
