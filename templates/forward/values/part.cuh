using Part = float[kPartColumns / 2];  // of PV, to be added to O
